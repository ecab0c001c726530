#include "nvme_controller.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <utility>

namespace mooncake::nvmeof::nvme {
namespace {

constexpr uint64_t kTickMs = 100;
constexpr uint16_t kAdminEntries = 32;

bool writes(const Command& command) { return command.entry.opcode == kWriteBlocks; }

}  // namespace

Controller::Controller(Url url, const Settings& settings, Over over)
    : url_(std::move(url)), settings_(settings), over_(std::move(over)) {}

Controller::~Controller() { stop(); }

Status Controller::start() {
  wake_fd_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_fd_.valid()) return system_failure(MC_IO, "cannot create an event descriptor", errno);
  if (Status status = fill_random(host_id_, sizeof host_id_); !status.ok()) return status;
  // The thread keeps the controller: the last operation may end, and let go of it, on this very thread.
  thread_ = std::thread([self = shared_from_this()] { self->serve(); });
  return {};
}

void Controller::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  if (wake_fd_.valid()) wake();
  std::thread thread;
  {
    std::lock_guard lock(mutex_);
    thread.swap(thread_);
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id()) {
    thread.detach();
  } else {
    thread.join();
  }
}

void Controller::wake() { eventfd_write(wake_fd_.get(), 1); }

// ---------------------------------------------------------------------------------------------- commands

Queue* Controller::roomy() {
  for (size_t i = 0; i < queues_.size(); ++i) {
    Queue& queue = *queues_[next_queue_++ % queues_.size()];
    if (!queue.full()) return &queue;
  }
  return nullptr;
}

bool Controller::held_back(const Command& command, uint64_t now) const {
  return writes(command) && now < fence_until_ns_;
}

bool Controller::give(const std::vector<Command*>& commands) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return false;
    for (Command* command : commands) {
      command->next = nullptr;
      *waiting_end_ = command;
      waiting_end_ = &command->next;
    }
    // What goes wrong here the service thread finds too, and deals with.
    if (state_ == State::kUp) (void)send_waiting();
  }
  changed_.notify_all();
  wake();
  return true;
}

Status Controller::run(Command& command) {
  command.sync = true;
  command.over = false;
  if (!give({&command})) return failed(MC_CLOSED, "the endpoint is closed");
  std::unique_lock lock(mutex_);
  // The service thread ends every command in time.
  changed_.wait(lock, [&] { return command.over; });
  return command.status;
}

Status Controller::send_waiting() {
  uint64_t now = now_ns();
  for (Command** next = &waiting_; *next != nullptr;) {
    Command& command = **next;
    if (held_back(command, now)) {
      next = &command.next;
      continue;
    }
    Queue* queue = roomy();
    if (queue == nullptr) return {};
    *next = command.next;
    if (waiting_end_ == &command.next) waiting_end_ = next;
    if (Status status = queue->start(command); !status.ok()) return status;
  }
  return {};
}

void Controller::end_waiting(const Status& why, std::vector<Command*>& over) {
  for (Command* command = std::exchange(waiting_, nullptr); command != nullptr; command = command->next) {
    command->status = why;
    over.push_back(command);
  }
  waiting_end_ = &waiting_;
}

void Controller::deliver(std::vector<Command*>& over) {
  bool anybody = false;
  for (Command* command : over) {
    if (command == &alive_) continue;
    if (!command->sync) {
      over_(*command);
      continue;
    }
    std::lock_guard lock(mutex_);
    command->over = true;
    anybody = true;
  }
  over.clear();
  if (anybody) changed_.notify_all();
}

// Writes that were under way may be applied yet: the target works off what it has taken, until it notices the
// loss. Others wait so long.
void Controller::lose(const Status& why, std::vector<Command*>& over) {
  state_ = State::kDown;
  std::vector<Command*> lost;
  for (auto& queue : queues_) queue->abandon(lost);
  bool uncertain = std::any_of(lost.begin(), lost.end(), [](const Command* each) { return writes(*each); });
  if (uncertain) fence_until_ns_ = deadline_after(settings_.fence_s);
  admin_.abandon(lost);
  queues_.clear();
  asking_alive_ = false;
  for (Command* command : lost) {
    command->status = why;
    over.push_back(command);
  }
}

uint64_t Controller::late_ns() {
  std::lock_guard lock(mutex_);
  uint64_t now = now_ns();
  return fence_until_ns_ > now ? fence_until_ns_ - now : 0;
}

// ---------------------------------------------------------------------------------------------- service
// thread

void Controller::serve() {
  prepare_thread("mc-nvme-tcp");
  std::vector<Command*> over;
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || waiting_ != nullptr; });
      if (stopping_) break;
    }
    Status status = establish();
    {
      std::lock_guard lock(mutex_);
      if (status.ok()) {
        state_ = State::kUp;
      } else {
        lose(status, over);
        end_waiting(status, over);
      }
    }
    deliver(over);
    if (status.ok()) stay_up();
  }
  {
    std::lock_guard lock(mutex_);
    Status closed = failed(MC_CLOSED, "the endpoint is closed");
    lose(closed, over);
    end_waiting(closed, over);
  }
  deliver(over);
}

void Controller::stay_up() {
  std::vector<Command*> over;
  for (;;) {
    Status status = turn(over);
    {
      std::lock_guard lock(mutex_);
      if (status.ok() && !stopping_) status = send_waiting();
      if (!status.ok() || stopping_) {
        lose(stopping_ ? failed(MC_CLOSED, "the endpoint is closed") : status, over);
        status = failed(MC_UNREACHABLE, "lost");
      }
    }
    deliver(over);
    if (!status.ok()) return;
  }
}

Status Controller::turn(std::vector<Command*>& over) {
  std::vector<pollfd>& items = polled_;
  items.assign({{wake_fd_.get(), POLLIN, 0}});
  uint64_t tick = kTickMs;
  {
    std::lock_guard lock(mutex_);
    auto add = [&](const Queue& queue) {
      items.push_back({queue.fd(), static_cast<short>(POLLIN | (queue.wants_write() ? POLLOUT : 0)), 0});
    };
    add(admin_);
    for (auto& queue : queues_) add(*queue);
    uint64_t now = now_ns();
    if (waiting_ != nullptr && fence_until_ns_ > now)
      tick = std::min(tick, (fence_until_ns_ - now) / 1'000'000 + 1);
  }
  ::poll(items.data(), items.size(), static_cast<int>(tick));
  if (items[0].revents != 0) {
    eventfd_t ignored;
    eventfd_read(wake_fd_.get(), &ignored);
  }
  std::lock_guard lock(mutex_);
  for (size_t i = 1; i < items.size(); ++i) {
    if (items[i].revents == 0) continue;
    Queue& queue = i == 1 ? admin_ : *queues_[i - 2];
    Status status = (items[i].revents & POLLOUT) != 0 ? queue.flush() : Status{};
    if (status.ok()) status = queue.receive(over);
    if (!status.ok()) return status;
  }
  return check_times(over);
}

Status Controller::check_times(std::vector<Command*>& over) {
  uint64_t now = now_ns();
  uint64_t limit = static_cast<uint64_t>(settings_.command_timeout_s * 1e9);
  for (auto& queue : queues_) {
    uint64_t oldest = queue->oldest_ns();
    if (oldest != 0 && now - oldest > limit)
      return failed(MC_UNREACHABLE, "the target did not finish a command within command_timeout_s");
  }
  for (Command* command : over) asking_alive_ = asking_alive_ && command != &alive_;
  uint64_t period = static_cast<uint64_t>(settings_.keep_alive_s * 1e9);
  if (period == 0) return {};
  if (asking_alive_ && now - asked_alive_ns_ > period)
    return failed(MC_UNREACHABLE, "the target did not answer a Keep Alive within keep_alive_s");
  if (asking_alive_ || now - asked_alive_ns_ < period / 2 || admin_.full()) return {};
  alive_ = Command{};
  alive_.entry.opcode = kKeepAlive;
  asking_alive_ = true;
  asked_alive_ns_ = now;
  return admin_.start(alive_);
}

// ---------------------------------------------------------------------------------------------- establishing

Status Controller::ask(Queue& queue, Command& command, uint64_t deadline_ns) {
  Status status = queue.start(command);
  std::vector<Command*> over;
  while (status.ok() && over.empty()) {
    uint64_t now = now_ns();
    if (now >= deadline_ns)
      return failed(MC_UNREACHABLE, "the target did not answer within connect_timeout_s");
    pollfd items[2] = {{queue.fd(), static_cast<short>(POLLIN | (queue.wants_write() ? POLLOUT : 0)), 0},
                       {wake_fd_.get(), 0, 0}};
    ::poll(items, 1, static_cast<int>(std::min<uint64_t>((deadline_ns - now) / 1'000'000 + 1, kTickMs)));
    {
      std::lock_guard lock(mutex_);
      if (stopping_) return failed(MC_CLOSED, "the endpoint is closed");
    }
    status = queue.flush();
    if (status.ok()) status = queue.receive(over);
  }
  return over.empty() ? status : command.status;
}

Status Controller::connect_queue(Queue& queue, uint16_t number, uint16_t depth, uint64_t deadline_ns) {
  QueueSettings settings{url_.host, url_.port, settings_.header_digest, settings_.data_digest, depth};
  if (Status status = queue.connect(settings, deadline_ns); !status.ok()) return status;
  queue.set_in_capsule(sizeof(ConnectData));
  ConnectData data{};
  std::memcpy(data.host_id, host_id_, sizeof host_id_);
  data.controller = number == 0 ? 0xffff : identity_.controller;
  url_.nqn.copy(data.subsystem, sizeof data.subsystem - 1);
  settings_.host_nqn.copy(data.host, sizeof data.host - 1);
  Command command;
  command.entry.opcode = kFabrics;
  command.entry.nsid = kConnect;
  command.entry.cdw10 = static_cast<uint32_t>(number) << 16;
  command.entry.cdw11 = static_cast<uint32_t>(depth - 1);
  command.entry.cdw12 = number == 0 ? static_cast<uint32_t>(2 * settings_.keep_alive_s * 1000) : 0;
  command.memory = reinterpret_cast<std::byte*>(&data);
  command.length = sizeof data;
  command.to_target = true;
  if (Status status = ask(queue, command, deadline_ns); !status.ok()) return status;
  if (number == 0) identity_.controller = static_cast<uint16_t>(command.value);
  queue.set_in_capsule(number == 0 ? 0 : in_capsule_);
  // One entry of a queue stays empty.
  queue.set_depth(static_cast<uint16_t>(depth - 1));
  return {};
}

Status Controller::property(uint32_t offset, uint64_t* value, uint64_t deadline_ns) {
  Command command;
  command.entry.opcode = kFabrics;
  command.entry.nsid = kPropertyGet;
  command.entry.cdw10 = offset == kRegisterCapabilities ? 1 : 0;
  command.entry.cdw11 = offset;
  Status status = ask(admin_, command, deadline_ns);
  *value = command.value;
  return status;
}

Status Controller::set_property(uint32_t offset, uint64_t value, uint64_t deadline_ns) {
  Command command;
  command.entry.opcode = kFabrics;
  command.entry.nsid = kPropertySet;
  command.entry.cdw11 = offset;
  command.entry.cdw12 = static_cast<uint32_t>(value);
  return ask(admin_, command, deadline_ns);
}

Status Controller::set_up_admin(uint64_t deadline_ns) {
  Status status = connect_queue(admin_, 0, kAdminEntries, deadline_ns);
  uint64_t capabilities = 0, ready = 0;
  if (status.ok()) status = property(kRegisterCapabilities, &capabilities, deadline_ns);
  if (status.ok()) status = set_property(kRegisterConfiguration, kEnable, deadline_ns);
  if (!status.ok()) return status;
  most_entries_ = static_cast<uint16_t>(std::min<uint64_t>((capabilities & 0xffff) + 1, 0xffff));
  uint64_t limit = std::min(deadline_ns, now_ns() + ((capabilities >> 24 & 0xff) + 1) * 500'000'000);
  while (status.ok() && (ready & 1) == 0) {
    if (now_ns() > limit)
      return failed(MC_UNREACHABLE, "the controller was enabled and did not become ready");
    status = property(kRegisterStatus, &ready, deadline_ns);
    if (status.ok() && (ready & 2) != 0) return failed(MC_IO, "the controller reports a fatal error");
    if ((ready & 1) == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return status;
}

Status Controller::identify(uint32_t what, uint32_t nsid, std::byte* page, uint64_t deadline_ns) {
  Command command;
  command.entry.opcode = kIdentify;
  command.entry.nsid = nsid;
  command.entry.cdw10 = what;
  command.memory = page;
  command.length = kIdentifyBytes;
  return ask(admin_, command, deadline_ns);
}

Status Controller::identify_all() {
  uint64_t deadline = deadline_after(settings_.connect_timeout_s);
  std::vector<std::byte> page(kIdentifyBytes);
  Status status = identify(kIdentifyController, 0, page.data(), deadline);
  if (!status.ok()) return status;
  auto text = [&](size_t at, size_t length) {
    std::string found(reinterpret_cast<const char*>(page.data()) + at, length);
    found.erase(found.find_last_not_of(std::string(" \0", 2)) + 1);
    return found;
  };
  identity_.serial = text(4, 20);
  identity_.model = text(24, 40);
  auto exponent = number_at<uint8_t>(page.data(), 77);
  identity_.most_bytes = exponent == 0 || exponent > 19 ? 0 : 4096u << exponent;
  uint64_t capsule = uint64_t{16} * number_at<uint32_t>(page.data(), 1792);
  uint16_t data_at = number_at<uint16_t>(page.data(), 1800);
  in_capsule_ =
      capsule > 64 && data_at == 0 ? static_cast<uint32_t>(std::min<uint64_t>(capsule - 64, 65536)) : 0;
  status = identify(kIdentifyNamespace, url_.nsid, page.data(), deadline);
  if (!status.ok())
    return failed(status.code, "namespace " + std::to_string(url_.nsid) + ": " + status.reason);
  identity_.blocks = number_at<uint64_t>(page.data(), 0);
  if (identity_.blocks == 0)
    return failed(MC_REFUSED, "the subsystem has no namespace " + std::to_string(url_.nsid));
  auto format = number_at<uint8_t>(page.data(), 26);
  size_t index = (format & 15u) | (format >> 1 & 0x30u);
  auto form = number_at<uint32_t>(page.data(), 128 + 4 * index);
  uint32_t shift = form >> 16 & 0xff;
  if ((form & 0xffff) != 0) return failed(MC_UNSUPPORTED, "the namespace has metadata beside its blocks");
  if (shift < 9 || shift > 16) return failed(MC_UNSUPPORTED, "the namespace has blocks of an odd size");
  identity_.block_bytes = 1u << shift;
  std::memcpy(identity_.nguid, page.data() + 104, 16);
  std::memset(identity_.uuid, 0, 16);
  // Targets of before NVMe 1.3 have no list of descriptors.
  if (!identify(kIdentifyDescriptors, url_.nsid, page.data(), deadline).ok()) return {};
  for (size_t at = 0; at + 20 <= page.size();) {
    auto kind = number_at<uint8_t>(page.data(), at), length = number_at<uint8_t>(page.data(), at + 1);
    if (length == 0 || kind == 0) break;
    if (kind == 3 && length == 16) std::memcpy(identity_.uuid, page.data() + at + 4, 16);
    at += 4u + length;
  }
  return {};
}

Status Controller::establish() {
  Status status = establish_queues();
  if (status.ok()) return status;
  // What was asked while establishing is asked again: nobody waits for those commands any more.
  std::vector<Command*> nobodys;
  admin_.abandon(nobodys);
  for (auto& queue : queues_) queue->abandon(nobodys);
  queues_.clear();
  return failed(status.code, "nvme-tcp " + url_.host + ":" + url_.port + ": " + status.reason);
}

// No other thread touches the queues while the state is kDown.
Status Controller::establish_queues() {
  uint64_t deadline = deadline_after(settings_.connect_timeout_s);
  admin_ = Queue();
  queues_.clear();
  Status status = set_up_admin(deadline);
  if (status.ok()) status = identify_all();
  if (!status.ok()) return status;
  if (url_.block_bytes != 0 && identity_.block_bytes != url_.block_bytes) {
    return failed(MC_REFUSED, "the namespace has blocks of " + std::to_string(identity_.block_bytes) +
                                  " bytes, not " + std::to_string(url_.block_bytes) +
                                  " as when it was registered");
  }
  uint32_t wanted = settings_.io_queues;
  Command count;
  count.entry.opcode = kSetFeatures;
  count.entry.cdw10 = kNumberOfQueues;
  count.entry.cdw11 = (wanted - 1) | (wanted - 1) << 16;
  status = ask(admin_, count, deadline);
  if (!status.ok()) return status;
  auto given = static_cast<uint32_t>(std::min(count.value & 0xffff, count.value >> 16 & 0xffff)) + 1;
  auto depth = static_cast<uint16_t>(std::clamp<uint32_t>(settings_.queue_entries, 2, most_entries_));
  for (uint32_t i = 0; i < std::min(wanted, given) && status.ok(); ++i) {
    queues_.push_back(std::make_unique<Queue>());
    status = connect_queue(*queues_.back(), static_cast<uint16_t>(i + 1), depth, deadline);
  }
  asked_alive_ns_ = now_ns();
  return status;
}

Status Controller::identify(const Url& url, const Settings& settings, Identity& identity) {
  Controller controller(url, settings, [](Command&) {});
  if (Status status = fill_random(controller.host_id_, 16); !status.ok()) return status;
  Status status = controller.set_up_admin(deadline_after(settings.connect_timeout_s));
  if (status.ok()) status = controller.identify_all();
  identity = controller.identity_;
  std::vector<Command*> none;
  controller.admin_.abandon(none);
  if (status.ok()) return status;
  return failed(status.code, "nvme-tcp " + url.host + ":" + url.port + ": " + status.reason);
}

}  // namespace mooncake::nvmeof::nvme
