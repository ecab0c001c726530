#include "endpoint.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cstring>

#include "support/memory.hpp"
#include "support/table.hpp"

namespace mooncake::efa {
namespace {

constexpr size_t kBatch = 64;
constexpr size_t kMostBatches = 16;       // of completions handled before others get the lock
constexpr uint64_t kTickNs = 20'000'000;  // how often clocks are looked at
constexpr uint64_t kGoodbyeNs = 200'000'000;
constexpr uint64_t kPolledNs = 50'000;  // so long after a poll somebody else makes progress
constexpr uint64_t kNapNs = 100'000;
constexpr uint64_t kShortestNapNs = 20'000;
constexpr uint64_t kGuestNapNs =
    500'000;  // providers in software move nothing for a peer while this one sleeps
constexpr uint64_t kLongNapNs = 1'000'000;
constexpr uint64_t kIdleNapNs = 5'000'000;
constexpr uint64_t kDefaultBandwidth = 1'000'000'000;
constexpr uint64_t kInFlightBytes = 32 << 20;

Status unknown(const char* what) {
  return failed(MC_INVALID, std::string("no ") + what + " has this handle");
}

}  // namespace

Endpoint::Endpoint(const Options& options)
    : generation_(driver::fork_generation()), shared_(options), initiator_(shared_), target_(shared_) {}

Status Endpoint::open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint) {
  Options parsed;
  if (Status status = parse_options(options, count, parsed); !status.ok()) return status;
  auto made = std::make_shared<Endpoint>(parsed);
  if (Status status = made->start(); !status.ok()) return status;
  endpoint = std::move(made);
  return {};
}

Status Endpoint::start() {
  if (generation_ == 0) return failed(MC_NO_MEMORY, "no memory to keep watch for forks");
  if (Status status = shared_.completions.open(); !status.ok()) return status;
  wake_fd_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!wake_fd_.valid()) return driver::system_failure(MC_IO, "cannot create a descriptor", errno);
  if (Status status = shared_.fabric.open(shared_.options); !status.ok()) return status;
  if (Status status = target_.open(); !status.ok()) return status;
  thread_ = std::thread([this] { run(); });
  return {};
}

void Endpoint::close() {
  if (forked() || !thread_.joinable()) return;
  stopping_ = true;
  wake();
  thread_.join();
  std::lock_guard lock(shared_.mutex);
  initiator_.close();
  target_.say_goodbye();
  // Peers then learn of the end at once; those that do not take it find out by themselves.
  for (uint64_t until = now_ns() + kGoodbyeNs;
       now_ns() < until && (target_.has_guests() || initiator_.is_parting() || target_.lingering());)
    progress();
  initiator_.links().close_all();
  target_.close();
  shared_.fabric.close();
}

Status Endpoint::caps(mc_caps& caps) const {
  const Fabric& fabric = shared_.fabric;
  const fi::Nic* nic = fabric.info().nic;
  uint64_t bits = nic != nullptr && nic->link_attr != nullptr ? nic->link_attr->speed : 0;
  caps.memory_kinds = 1u << MC_DRAM | (fabric.moves_cuda() ? 1u << MC_CUDA : 0);
  caps.bandwidth_bytes_per_s = bits != 0 ? bits / 8 : kDefaultBandwidth;
  caps.latency_ns = fabric.is_efa() ? 15'000 : 30'000;
  caps.max_op_bytes = fabric.max_bytes() == ~uint64_t{0} ? 0 : fabric.max_bytes();
  caps.in_flight_bytes = kInFlightBytes;
  caps.in_flight_ops = shared_.options.queue_depth;
  caps.notice_bytes = kMaxAddress;
  return {};
}

Status Endpoint::stats(mc_stats& stats) {
  shared_.completions.add_to(stats);
  std::lock_guard lock(shared_.mutex);
  stats.connections = initiator_.ready();
  stats.refused = target_.refused();
  return {};
}

Status Endpoint::export_address(void* blob, size_t* length) const {
  Address address;
  const fi::Info& info = shared_.fabric.info();
  address.format = info.addr_format;
  std::strncpy(address.provider.data(), info.fabric_attr->prov_name, address.provider.size() - 1);
  address.name = target_.name();
  address.door = target_.door();
  return driver::copy_out(&address, sizeof address, blob, length);
}

Status Endpoint::connect(const void* address, size_t length, mc_handle* connection) {
  Address peer;
  if (length != sizeof peer) return failed(MC_INVALID, "this is no address of an endpoint of this driver");
  std::memcpy(&peer, address, sizeof peer);
  peer.provider.back() = 0;
  if (peer.magic != kMagic || peer.door.length > kMaxAddress)
    return failed(MC_INVALID, "this is no address of an endpoint of this driver");
  const fi::Info& info = shared_.fabric.info();
  if (peer.format != info.addr_format || std::strcmp(peer.provider.data(), info.fabric_attr->prov_name) != 0)
    return failed(MC_UNREACHABLE, std::string("the peer uses libfabric's provider ") + peer.provider.data() +
                                      ", this side " + info.fabric_attr->prov_name);
  std::shared_ptr<Connection> made;
  {
    std::lock_guard lock(shared_.mutex);
    made = initiator_.connect(peer);
  }
  return connections_.add(std::move(made), connection);
}

void Endpoint::disconnect(mc_handle connection) {
  auto taken = connections_.take(connection);
  if (!taken) return;
  std::lock_guard lock(shared_.mutex);
  initiator_.disconnect(taken);
  shared_.hand_out();
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  uint64_t kinds = 1u << MC_DRAM | (shared_.fabric.moves_cuda() ? 1u << MC_CUDA : 0u);
  Status known = driver::check_memory(
      memory, kinds, "libfabric's " + shared_.fabric.name() + " does not take this kind of memory");
  if (!known.ok()) return known;
  auto region = std::make_shared<Region>();
  std::memcpy(&region->memory, &memory, std::min<size_t>(memory.struct_size, sizeof memory));
  if (Status status = target_.add(region); !status.ok()) return status;
  return regions_.add(region, registered);
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return unknown("memory");
  if (Status status = target_.withdraw(*region, deadline_ns); !status.ok()) return status;
  regions_.take(registered);
  return {};
}

Status Endpoint::export_key(mc_handle registered, void*, size_t* length) const {
  if (!regions_.get(registered)) return unknown("memory");
  *length = 0;  // the owner tells the rest when it is asked
  return {};
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                            const void*, size_t, mc_handle* remote) {
  std::shared_ptr<Connection> peer = connections_.get(connection);
  if (!peer) return unknown("connection");
  std::shared_ptr<Remote> made;
  {
    std::lock_guard lock(shared_.mutex);
    made = initiator_.import(*peer, region_id, driver::key_from(key));
  }
  return remotes_.add(std::move(made), remote);
}

void Endpoint::release_key(mc_handle remote) {
  auto taken = remotes_.take(remote);
  if (!taken) return;
  std::lock_guard lock(shared_.mutex);
  initiator_.release(taken);
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, void*, size_t* length) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return unknown("memory");
  *length = 0;
  return target_.grant(*region, key, access);
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return unknown("memory");
  return target_.revoke(*region, key, deadline_ns);
}

// ---- operations

// The objects that an operation names. Neighbours in a batch mostly name the same ones: looked up once.
struct Endpoint::Names {
  mc_handle connection_handle = 0, local_handle = 0, remote_handle = 0;
  Connection* connection = nullptr;
  Region* local = nullptr;
  Remote* remote = nullptr;

  // What is wrong with an operation on them; null when nothing is.
  const char* fault(const mc_op& op) const {
    if (remote->connection != connection) return "the remote region belongs to another connection";
    if (op.opcode > MC_WRITE || op.length == 0) return "the operation is neither read nor write, or empty";
    if (op.local_offset > local->memory.length || op.length > local->memory.length - op.local_offset)
      return "the range ends outside the local memory";
    return nullptr;
  }
  // Whether `next` will be posted to the same link as `op`, by the same names.
  bool follows(const mc_op& next, const mc_op& op) const {
    return next.connection == op.connection && next.remote == op.remote && next.local == op.local &&
           fault(next) == nullptr &&
           remote->allows(static_cast<mc_opcode>(next.opcode), next.remote_offset, next.length) &&
           connection->link != nullptr && connection->link->has_room_for_two();
  }
};

Status Endpoint::look_up(const mc_op& op, Names& names) const {
  if (op.connection != names.connection_handle) {
    const auto* found = connections_.find(op.connection);
    if (found == nullptr) return unknown("connection");
    names.connection = found->get();
    names.connection_handle = op.connection;
  }
  if (op.local != names.local_handle) {
    const auto* found = regions_.find(op.local);
    if (found == nullptr) return unknown("memory");
    names.local = found->get();
    names.local_handle = op.local;
  }
  if (op.remote != names.remote_handle) {
    const auto* found = remotes_.find(op.remote);
    if (found == nullptr) return unknown("remote region");
    names.remote = found->get();
    names.remote_handle = op.remote;
  }
  const char* fault = names.fault(op);
  return fault == nullptr ? Status{} : failed(MC_INVALID, fault);
}

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  size_t room = shared_.completions.reserve(count);
  Names names;
  size_t taken = 0;
  {
    std::lock_guard lock(shared_.mutex);
    while (taken < room) {
      const mc_op& op = ops[taken];
      ++taken;
      if (Status status = look_up(op, names); !status.ok()) {
        shared_.refuse(op, status);
        names = {};
        continue;
      }
      Operation& operation = *shared_.new_operation();
      operation.connection = names.connection;
      operation.remote = names.remote;
      operation.descriptor = names.local->local.descriptor;
      operation.local_address = names.local->memory.address + op.local_offset;
      operation.remote_offset = op.remote_offset;
      operation.length = op.length;
      operation.cookie = op.cookie;
      operation.opcode = static_cast<mc_opcode>(op.opcode);
      bool more = taken < room && taken % kMostMore != 0 && names.follows(ops[taken], op);
      initiator_.place(operation, more);
    }
    shared_.hand_out();
  }
  *accepted = taken;
  if (initiator_.wanted()) wake();
  // So short that it needs no memory of its own: a busy engine comes by here with each batch.
  return taken == count ? Status{} : failed(MC_AGAIN, "poll first");
}

size_t Endpoint::poll(mc_completion* completions, size_t capacity) {
  size_t count = shared_.completions.poll(completions, capacity);
  if (count > 0) return count;
  std::unique_lock lock(shared_.mutex, std::try_to_lock);
  if (!lock.owns_lock() || shared_.operations_under_way() == 0) return 0;
  polled_ns_.store(now_ns(), std::memory_order_relaxed);
  progress();
  lock.unlock();
  return shared_.completions.poll(completions, capacity);
}

void Endpoint::cancel(uint64_t cookie) {
  std::lock_guard lock(shared_.mutex);
  initiator_.cancel(cookie);
  shared_.hand_out();
}

Status Endpoint::notify(mc_handle handle, const void* data, size_t length, uint64_t cookie) {
  const auto* found = connections_.find(handle);
  if (found == nullptr) return unknown("connection");
  if (length > kMaxAddress)
    return failed(MC_INVALID, "a notice has up to " + std::to_string(kMaxAddress) + " bytes, this one " +
                                  std::to_string(length));
  if (shared_.completions.reserve(1) == 0) return failed(MC_AGAIN, "poll, then call again");
  {
    std::lock_guard lock(shared_.mutex);
    initiator_.notify(**found, data, length, cookie);
    shared_.hand_out();
  }
  wake();
  return {};
}

size_t Endpoint::poll_notices(mc_notice* notices, size_t capacity) {
  std::lock_guard lock(shared_.mutex);
  progress();
  return target_.poll_notices(notices, capacity);
}

bool Endpoint::arm() {
  if (!shared_.completions.arm()) return false;
  std::lock_guard lock(shared_.mutex);
  return !target_.has_notices();
}

Status Endpoint::late_writes(mc_handle handle, void* token, size_t* length) {
  const auto* found = connections_.find(handle);
  if (found == nullptr) return unknown("connection");
  std::lock_guard lock(shared_.mutex);
  const Name& late = (*found)->late;
  if (late == Name{}) {
    *length = 0;
    return {};
  }
  return driver::copy_out(late.data(), late.size(), token, length);
}

Status Endpoint::fence(const void* token, size_t length, uint64_t) {
  Name session;
  if (length != session.size()) return failed(MC_INVALID, "this is no token of this driver");
  std::memcpy(session.data(), token, session.size());
  target_.end(session);
  return {};
}

// ---- progress

void Endpoint::wake() { [[maybe_unused]] int ignored = eventfd_write(wake_fd_.get(), 1); }

size_t Endpoint::progress(size_t looks) {
  size_t total = 0;
  for (size_t batch = 0; batch < kMostBatches; ++batch) {
    size_t count = read_queue();
    total += count;
    if (count < kBatch && batch + 1 >= looks) break;
  }
  initiator_.advance();
  target_.advance();
  if (uint64_t now = now_ns(); now - ticked_ns_ > kTickNs) {
    ticked_ns_ = now;
    initiator_.tick(now);
    target_.tick(now);
  }
  shared_.hand_out();
  return total;
}

size_t Endpoint::read_queue() {
  fi::QueueEntry entries[kBatch];
  fi::Queue* queue = shared_.fabric.queue();
  ssize_t count = queue->ops->read(queue, entries, kBatch);
  if (count == -fi::kErrorAvailable) {
    read_errors();
    return 1;
  }
  for (ssize_t i = 0; i < count; ++i) on_completion(entries[i]);
  return count > 0 ? static_cast<size_t>(count) : 0;
}

void Endpoint::on_completion(const fi::QueueEntry& entry) {
  if ((entry.flags & fi::kRemoteData) != 0) {
    target_.on_data(entry.data);
    if (!shared_.fabric.data_takes_receives()) return;  // then its context is nobody's
  }
  auto* token = static_cast<Token*>(entry.op_context);
  if (token == nullptr || token->link->closed()) return;
  Link& link = *token->link;
  switch (token->use) {
    case Token::Use::kTransfer:
      if (token->operation != nullptr) initiator_.on_transfer(*token, nullptr);
      return;
    case Token::Use::kSend:
      link.give_back(*token);
      return;
    case Token::Use::kReceive: {
      bool message = (entry.flags & fi::kRemoteData) == 0 && token->message->sane(entry.len);
      Message received = *token->message;
      link.repost(*token);
      if (!message) return;
      if (received.kind == Kind::kWelcome || !link.incoming)
        initiator_.on_message(received);
      else
        target_.on_message(link, received);
      return;
    }
  }
}

void Endpoint::read_errors() {
  fi::ErrorEntry entry{};
  fi::Queue* queue = shared_.fabric.queue();
  if (queue->ops->readerr(queue, &entry, 0) == 1) on_error(entry);
}

void Endpoint::on_error(const fi::ErrorEntry& entry) {
  auto* token = static_cast<Token*>(entry.op_context);
  if (token == nullptr || token->link->closed()) return;
  Link& link = *token->link;
  Status failure = failed(Initiator::code_of(entry.err),
                          shared_.fabric.name() + " reports: " + shared_.fabric.say(entry.err));
  switch (token->use) {
    case Token::Use::kTransfer:
      if (token->operation != nullptr) initiator_.on_transfer(*token, &failure);
      return;
    case Token::Use::kSend: {
      bool incoming = link.incoming;
      link.give_back(*token);
      failure.code = MC_UNREACHABLE;
      if (incoming)
        target_.on_lost_send(*token);
      else
        initiator_.on_lost_send(*token, failure);
      return;
    }
    case Token::Use::kReceive:
      link.repost(*token);
      return;
  }
}

void Endpoint::run() {
  driver::prepare_thread("mc-efa");
  prctl(PR_SET_TIMERSLACK, 1000);
  uint64_t idle_since_ns = 0;  // since when something should have happened and did not
  while (!stopping_) {
    uint64_t pause = 0;
    {
      std::lock_guard lock(shared_.mutex);
      bool found = progress(shared_.operations_under_way() > 0 ? 1 : shared_.fabric.looks()) > 0;
      bool busy = shared_.operations_under_way() > 0;
      uint64_t now = now_ns();
      if (found || !busy) idle_since_ns = now;
      pause = pause_ns(busy, now - idle_since_ns);
    }
    if (pause > 0) sleep(pause);
  }
}

// Nothing wakes this thread when the fabric has something, so it looks again soon.
uint64_t Endpoint::pause_ns(bool busy, uint64_t idle_ns) const {
  if (passed(polled_ns_.load(std::memory_order_relaxed), now_ns()) < kPolledNs) return kNapNs;
  // The longer it has been in vain, the longer: a wait is prolonged by a quarter at most.
  if (busy && idle_ns < shared_.options.spin_us * 1000ull) return 0;
  if (busy) return std::clamp(idle_ns / 4, kShortestNapNs, kLongNapNs);
  if (initiator_.stalled() || target_.stalled()) return kNapNs;
  if (target_.has_guests()) return kGuestNapNs;
  return initiator_.has_connections() ? kLongNapNs : kIdleNapNs;
}

void Endpoint::sleep(uint64_t pause_ns) {
  pollfd watched{wake_fd_.get(), POLLIN, 0};
  timespec left{0, static_cast<long>(pause_ns)};
  ppoll(&watched, 1, &left, nullptr);
  eventfd_t ignored;
  if (watched.revents != 0) eventfd_read(wake_fd_.get(), &ignored);
}

}  // namespace mooncake::efa
