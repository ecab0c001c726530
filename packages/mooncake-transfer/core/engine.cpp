#include "engine.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace mooncake {

namespace {

constexpr uint64_t kSpinNs = 50'000;
constexpr int kIdleWaitMs = 1000;
constexpr int kBusyWaitMs = 1;  // a full driver queue, or a driver without an event descriptor
constexpr uint32_t kMaxRails = 32;

std::string range_text(uint64_t offset, uint64_t length) {
  return "[" + std::to_string(offset) + ", " + std::to_string(offset) + " + " + std::to_string(length) + ")";
}

Status check_block(const Block& block, const Region& local, const RemoteRegion& remote) {
  auto inside = [&](uint64_t offset, uint64_t size) {
    return offset <= size && block.length <= size - offset;
  };
  if (!inside(block.local_offset, local.length)) {
    return Status::error(Code::kRefused, "block " + range_text(block.local_offset, block.length) +
                                             " is outside local region '" + local.name + "' of " +
                                             std::to_string(local.length) + " bytes");
  }
  if (!inside(block.remote_offset, remote.length())) {
    return Status::error(Code::kRefused, "block " + range_text(block.remote_offset, block.length) +
                                             " is outside " + remote.label() + " of " +
                                             std::to_string(remote.length()) + " bytes");
  }
  return {};
}

// Whether a rail can be used for a transfer at all.
bool fits(const Endpoint& endpoint, const Region& local, size_t index, uint64_t alignment_bits) {
  uint64_t alignment = std::max<uint64_t>(endpoint.caps().alignment, 1);
  return local.handles[index] != 0 && (alignment_bits & (alignment - 1)) == 0;
}

}  // namespace

Engine::~Engine() {
  close();
  // Not in close(): another thread may still be about to write to them.
  ::close(wake_fd_);
  ::close(epoll_fd_);
}

Engine::Engine()
    : wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)), epoll_fd_(epoll_create1(EPOLL_CLOEXEC)) {}

Status Engine::add_driver(const mc_driver_v1* table, const std::string& name,
                          const Endpoint::Options& options) {
  Status usable = Endpoint::check(table);
  if (!usable.ok()) return usable;
  auto endpoint = std::make_unique<Endpoint>(table, name);
  Status opened = endpoint->open(options);
  if (opened.ok()) endpoints_->push_back(std::move(endpoint));
  return opened;
}

Status Engine::start() {
  if (wake_fd_ < 0 || epoll_fd_ < 0) {
    return Status::error(Code::kIo, "no descriptor left for the engine's event loop; raise `ulimit -n`");
  }
  std::vector<int> fds{wake_fd_};
  for (auto& endpoint : *endpoints_) {
    if (int fd = endpoint->event_fd(); fd >= 0) fds.push_back(fd);
  }
  for (int fd : fds) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = fd;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
      return Status::error(Code::kIo, std::string("cannot watch an event descriptor: ") + strerror(errno));
    }
  }
  progress_ = std::thread([this] { run(); });
  return {};
}

void Engine::close() {
  if (getpid() !=
      owner_) {  // a forked child: its parent goes on with everything, and locks may be held for ever
    closing_ = true;
    if (progress_.joinable()) progress_.detach();
    for (auto& endpoint : *endpoints_) endpoint->abandon();
    return;
  }
  std::call_once(closed_, [this] {
    closing_ = true;
    wake();
    if (progress_.joinable()) progress_.join();
    for (auto& endpoint : *endpoints_) endpoint->close();
    // From here no driver touches memory any more, so transfers may end.
    std::unordered_set<std::shared_ptr<Transfer>> orphans;
    {
      std::lock_guard lock(mutex_);
      orphans.swap(active_);
      backlog_.clear();
    }
    for (const auto& transfer : orphans) {
      transfer->note_failure(
          Status::error(Code::kClosed, "the engine was closed while the transfer was running"));
      transfer->local->leave();
      transfer->complete();
    }
  });
}

Status Engine::export_addresses(std::vector<DriverBlob>* addresses) {
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    DriverBlob address{i, {}};
    Status status = (*endpoints_)[i]->export_address(&address.blob);
    if (!status.ok()) return status;
    addresses->push_back(std::move(address));
  }
  return {};
}

// ---- regions and peers

Status Engine::register_region(mc_memory memory, const std::string& name, std::shared_ptr<Region>* out) {
  auto region = std::make_shared<Region>(endpoints_->size());
  region->id = memory.region_id;
  region->address = memory.address;
  region->length = memory.length;
  region->name = name;
  memory.struct_size = sizeof(memory);
  std::string reasons;
  bool taken = false;
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    Endpoint& endpoint = *(*endpoints_)[i];
    if (!endpoint.takes(static_cast<mc_memory_kind>(memory.kind))) continue;
    mc_handle handle = 0;
    Status status = endpoint.register_memory(memory, &handle);
    if (status.ok()) region->handles[i] = handle;
    taken |= status.ok();
    if (!status.ok()) reasons += (reasons.empty() ? "" : "; ") + status.reason;
  }
  if (!taken) {
    return Status::error(closing_ ? Code::kClosed : Code::kUnsupported,
                         "no driver registers region '" + name +
                             "': " + (reasons.empty() ? "none takes this kind of memory" : reasons));
  }
  *out = std::move(region);
  return {};
}

Status Engine::export_keys(const Region& region, std::vector<DriverBlob>* keys) {
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    if (region.handles[i] == 0) continue;
    DriverBlob key{i, {}};
    Status status = (*endpoints_)[i]->export_key(region.handles[i], &key.blob);
    if (!status.ok()) return status;
    keys->push_back(std::move(key));
  }
  return {};
}

Status Engine::close_region(Region& region, uint64_t deadline_ns) {
  auto deadline = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
  std::unique_lock closer(region.closer, deadline);
  if (!closer) {
    return Status::error(Code::kRegionBusy,
                         "region '" + region.name + "' is being closed by another thread, which still waits");
  }
  {
    std::unique_lock lock(region.mutex);
    region.closing = true;
    if (!region.idle.wait_until(lock, deadline, [&] { return region.in_flight == 0; })) {
      return Status::error(Code::kRegionBusy,
                           "region '" + region.name + "' is used by " + std::to_string(region.in_flight) +
                               " transfers of this engine; wait for or cancel them, then close again");
    }
  }
  for (size_t i = 0; i < endpoints_->size(); ++i) {
    if (region.handles[i] == 0) continue;
    Status status = (*endpoints_)[i]->deregister_memory(region.handles[i], deadline_ns);
    if (status.code == Code::kTimeout) {
      return Status::error(Code::kRegionBusy, "region '" + region.name +
                                                  "' is revoked, but peers still use it: " + status.reason +
                                                  "; close it again later");
    }
    region.handles[i] = 0;
    if (!status.ok() && status.code != Code::kClosed) return status;
  }
  return {};
}

Status Engine::add_peer(const std::string& label, const std::vector<DriverBlob>& addresses,
                        std::shared_ptr<Peer>* out) {
  auto peer = std::make_shared<Peer>(endpoints_, label);
  std::string reasons;
  bool reached = false;
  for (const DriverBlob& address : addresses) {
    Status status = peer->add(address.endpoint, address.blob);
    reached |= status.ok();
    if (!status.ok()) reasons += (reasons.empty() ? "" : "; ") + status.reason;
  }
  if (!reached) {
    return Status::error(Code::kNoRoute,
                         "no driver of this engine connects to " + label + ": " +
                             (reasons.empty() ? "the two have no driver in common" : reasons));
  }
  *out = std::move(peer);
  return {};
}

Status Engine::import_region(std::shared_ptr<Peer> peer, const std::string& name, uint64_t region_id,
                             const uint8_t* key, uint64_t length, const std::vector<DriverBlob>& keys,
                             std::shared_ptr<RemoteRegion>* out) {
  auto remote = std::make_shared<RemoteRegion>(endpoints_, peer, length, name);
  std::string reasons;
  for (const DriverBlob& blob : keys) {
    if (peer->connection(blob.endpoint) == 0 || remote->rails().size() == kMaxRails) continue;
    Status status = remote->add_rail(blob.endpoint, region_id, key, blob.blob);
    if (!status.ok()) reasons += (reasons.empty() ? "" : "; ") + status.reason;
  }
  if (remote->rails().empty()) {
    return Status::error(Code::kNoRoute,
                         "no driver leads to " + remote->label() + ": " +
                             (reasons.empty() ? "the two have no driver in common" : reasons));
  }
  *out = std::move(remote);
  return {};
}

// ---- transfers

Status Engine::submit(mc_opcode opcode, std::shared_ptr<Region> local, std::shared_ptr<RemoteRegion> remote,
                      const Block* blocks, size_t count, std::shared_ptr<Transfer>* out) {
  if (closing_) return Status::error(Code::kClosed, "the engine is closed");
  if (!local->enter())
    return Status::error(Code::kRegionClosed, "local region '" + local->name + "' is closed");
  auto transfer = std::make_shared<Transfer>(local, std::move(remote), endpoints_->size());
  Status valid = build_ops(*transfer, opcode, blocks, count);
  if (!valid.ok()) {
    local->leave();
    return valid;
  }
  *out = transfer;
  size_t total = transfer->ops.size();
  if (total == 0) {
    local->leave();
    transfer->complete();
    return {};
  }
  transfer->remaining_ = total;
  {
    std::lock_guard lock(mutex_);
    if (closing_) {
      local->leave();
      return Status::error(Code::kClosed, "the engine is closed");
    }
    active_.insert(transfer);
  }
  size_t stopped = submit_range(*transfer, 0, total);
  if (stopped < total) {
    std::lock_guard lock(mutex_);
    backlog_.push_back({transfer, stopped, total});
    wake();
  }
  poll(false);  // what a driver finished on the spot is done when submit returns
  return {};
}

Status Engine::build_ops(Transfer& transfer, mc_opcode opcode, const Block* blocks, size_t count) {
  const Region& local = *transfer.local;
  const RemoteRegion& remote = *transfer.remote;
  uint64_t alignment_bits = 0;
  for (size_t i = 0; i < count; ++i) {
    Status inside = check_block(blocks[i], local, remote);
    if (!inside.ok()) return inside;
    alignment_bits |= blocks[i].local_offset | blocks[i].remote_offset | blocks[i].length;
  }
  // Operations are routed one by one, so a rail must take the smallest limit of all that may be tried.
  uint64_t max_bytes = ~uint64_t{0};
  uint32_t unusable = 0;
  for (size_t r = 0; r < remote.rails().size(); ++r) {
    size_t index = remote.rails()[r]->endpoint;
    const Endpoint& endpoint = *(*endpoints_)[index];
    if (!fits(endpoint, local, index, alignment_bits)) {
      unusable |= 1u << r;
    } else if (endpoint.caps().max_op_bytes != 0) {
      max_bytes = std::min(max_bytes, endpoint.caps().max_op_bytes);
    }
  }
  auto& ops = transfer.ops;
  ops.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    Block block = blocks[i];
    transfer.total_bytes += block.length;
    if (!ops.empty() && block.length != 0) {
      mc_op& last = ops.back();
      bool adjacent = last.local_offset + last.length == block.local_offset &&
                      last.remote_offset + last.length == block.remote_offset;
      if (adjacent && last.length + block.length <= max_bytes) {
        last.length += block.length;
        continue;
      }
    }
    while (block.length != 0) {
      uint64_t length = std::min(block.length, max_bytes);
      ops.push_back(
          {static_cast<uint32_t>(opcode), 0, 0, 0, 0, block.local_offset, block.remote_offset, length, 0});
      block = {block.local_offset + length, block.remote_offset + length, block.length - length};
    }
  }
  transfer.states.resize(ops.size());
  for (size_t i = 0; i < ops.size(); ++i) {
    OpState& state = transfer.states[i];
    state = {&transfer, static_cast<uint32_t>(i), 0, unusable};
    ops[i].cookie = reinterpret_cast<uint64_t>(&state);
    if (!route(transfer, state)) {
      return Status::error(Code::kNoRoute, "no driver moves bytes between region '" + local.name + "' and " +
                                               remote.label() + ": " + transfer.attempts());
    }
  }
  return {};
}

bool Engine::route(Transfer& transfer, OpState& state) {
  const auto& rails = transfer.remote->rails();
  uint64_t now = now_ns();
  size_t best = rails.size();
  uint64_t best_pause = ~uint64_t{0};
  for (size_t r = 0; r < rails.size(); ++r) {
    if (state.tried & (1u << r)) continue;
    uint64_t paused_until = rails[r]->paused_until_ns;
    uint64_t pause = paused_until > now ? paused_until : 0;
    if (best == rails.size() || pause < best_pause) {
      best = r;
      best_pause = pause;
    }
  }
  if (best == rails.size()) return false;
  const Rail& rail = *rails[best];
  mc_op& op = transfer.ops[state.index];
  std::atomic_ref(state.rail) = static_cast<uint32_t>(best);  // cancel() looks at it from other threads
  state.tried |= 1u << best;
  op.connection = transfer.remote->peer().connection(rail.endpoint);
  op.local = transfer.local->handles[rail.endpoint];
  op.remote = rail.remote;
  return true;
}

size_t Engine::submit_range(Transfer& transfer, size_t begin, size_t end) {
  while (begin < end) {
    uint32_t rail = transfer.states[begin].rail;
    size_t stop = begin + 1;
    while (stop < end && transfer.states[stop].rail == rail) ++stop;
    Endpoint& endpoint = *(*endpoints_)[transfer.remote->rails()[rail]->endpoint];
    size_t accepted = 0;
    Status status = endpoint.submit(&transfer.ops[begin], stop - begin, &accepted);
    begin += accepted;
    if (!status.ok() && begin < stop) {
      // The transfer is alive: the operation that failed has not been counted yet.
      on_failure(transfer, transfer.states[begin], std::move(status));
      ++begin;
    } else if (begin < stop) {
      return begin;
    }
  }
  return begin;
}

void Engine::on_completion(const mc_completion& completion) {
  OpState& state = *reinterpret_cast<OpState*>(completion.cookie);
  Transfer& transfer = *state.owner;
  if (completion.status == MC_OK) {
    Rail& rail = *transfer.remote->rails()[state.rail];
    if (rail.paused_until_ns != 0) rail.paused_until_ns = 0;
    uint64_t length = transfer.ops[state.index].length;
    transfer.bytes_done += length;
    transfer.bytes_by_endpoint[rail.endpoint] += length;
    finish(transfer, 1);
    return;
  }
  const std::string& driver = (*endpoints_)[transfer.remote->rails()[state.rail]->endpoint]->name();
  on_failure(transfer, state, Status::error(code_of(completion.status), driver + ": " + completion.reason));
}

void Engine::on_failure(Transfer& transfer, OpState& state, Status status) {
  constexpr uint64_t kPauseNs = 1'000'000'000;
  bool elsewhere = status.code == Code::kUnreachable || status.code == Code::kUnsupported ||
                   status.code == Code::kIo || status.code == Code::kNoMemory || status.code == Code::kClosed;
  if (elsewhere && !transfer.cancelled && !closing_) {
    // Another driver may do it. Reads and writes of the same bytes may be repeated.
    transfer.note_attempt(status.reason);
    Rail& rail = *transfer.remote->rails()[state.rail];
    rail.paused_until_ns = status.code == Code::kUnsupported ? ~uint64_t{0} : now_ns() + kPauseNs;
    if (route(transfer, state)) {
      std::lock_guard lock(mutex_);
      backlog_.push_back({transfer.shared_from_this(), state.index, state.index + 1u});
      wake();
      return;
    }
    Code code = status.code == Code::kUnsupported ? Code::kNoRoute : status.code;
    status = Status::error(code, "cannot reach " + transfer.remote->label() + ": " + transfer.attempts());
  } else {
    status.reason = transfer.remote->label() + ": " + status.reason;
  }
  transfer.note_failure(status);
  transfer.cancelled = true;  // the rest would be work for nothing: what no driver has taken yet is dropped
  finish(transfer, 1);
}

void Engine::finish(Transfer& transfer, uint64_t ops) {
  if (!transfer.finish_ops(ops)) return;
  std::shared_ptr<Transfer> keep = transfer.shared_from_this();
  {
    std::lock_guard lock(mutex_);
    if (active_.erase(keep) == 0) return;  // close() ended it
  }
  transfer.local->leave();
  transfer.complete();
}

void Engine::cancel(Transfer& transfer) {
  if (transfer.done()) return;
  transfer.cancelled = true;
  for (size_t i = 0; i < transfer.ops.size(); ++i) {
    size_t endpoint = transfer.remote->rails()[std::atomic_ref(transfer.states[i].rail)]->endpoint;
    (*endpoints_)[endpoint]->cancel(transfer.ops[i].cookie);
  }
  wake();  // the backlog drops what no driver has taken yet
}

void Engine::spin(const Transfer& transfer) {
  uint64_t until = now_ns() + kSpinNs;
  while (!transfer.done() && now_ns() < until) poll(false);
}

// ---- progress

void Engine::wake() { [[maybe_unused]] int ignored = eventfd_write(wake_fd_, 1); }

size_t Engine::poll(bool wait_for_turn) {
  size_t total = 0;
  for (auto& endpoint : *endpoints_) {
    if (endpoint->outstanding == 0) continue;
    total +=
        endpoint->poll(wait_for_turn, [this](const mc_completion& completion) { on_completion(completion); });
  }
  return total;
}

bool Engine::arm_all() {
  bool armed = true;
  for (auto& endpoint : *endpoints_) armed &= endpoint->arm();
  return armed;
}

void Engine::drain_backlog() {
  std::deque<Pending> pending;
  {
    std::lock_guard lock(mutex_);
    pending.swap(backlog_);
  }
  // Who got room in a driver's queue goes behind who got none, or a large transfer would starve the others.
  std::deque<Pending> served;
  for (Pending& item : pending) {
    Transfer& transfer = *item.transfer;
    if (transfer.cancelled) {
      transfer.note_failure(Status::error(Code::kCancelled, "the transfer was cancelled"));
      finish(transfer, item.end - item.begin);
      continue;
    }
    size_t begin = std::exchange(item.begin, submit_range(transfer, item.begin, item.end));
    // A cancel() meanwhile may have asked the driver before it had the operations.
    if (transfer.cancelled) cancel(transfer);
    if (item.begin == item.end) continue;
    if (item.begin > begin) {
      served.push_back(std::move(item));
    } else {
      std::lock_guard lock(mutex_);
      backlog_.push_back(std::move(item));
    }
  }
  std::lock_guard lock(mutex_);
  std::move(served.begin(), served.end(), std::back_inserter(backlog_));
}

void Engine::run() {
  while (!closing_) {
    drain_backlog();
    if (poll(true) > 0 || !arm_all()) continue;
    bool busy;
    {
      std::lock_guard lock(mutex_);
      busy = !backlog_.empty();
    }
    for (auto& endpoint : *endpoints_) busy |= endpoint->outstanding != 0 && endpoint->event_fd() < 0;
    epoll_event events[16];
    int count = epoll_wait(epoll_fd_, events, 16, busy ? kBusyWaitMs : kIdleWaitMs);
    for (int i = 0; i < count; ++i) {
      eventfd_t drained;
      if (events[i].data.fd == wake_fd_) eventfd_read(wake_fd_, &drained);
    }
  }
}

}  // namespace mooncake
