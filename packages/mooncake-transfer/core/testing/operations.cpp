// The life of an operation in the fabric: taken, served in turn, delivered, ended once.
#include <algorithm>
#include <atomic>

#include "fabric.hpp"

namespace mooncake::fake {

namespace {

constexpr size_t kServedKept = 1 << 16;

uint64_t nanoseconds(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

// The lower of two bandwidths, of which 0 stands for no limit.
double narrower(double one, double other) {
  if (one == 0 || other == 0) return std::max(one, other);
  return std::min(one, other);
}

bool misaligned(const mc_op& op, uint32_t alignment) {
  return alignment > 1 && ((op.local_offset | op.remote_offset | op.length) % alignment) != 0;
}

}  // namespace

// ---- taken

Result Fabric::submit(Endpoint& endpoint, uint64_t stream, const mc_op* ops, size_t count, size_t* accepted) {
  Lock lock(mutex_);
  Device& device = *endpoint.device;
  Counters& counters = device.counters;
  ++counters.submits;
  counters.stream_submits += stream != 0;
  size_t taken = 0;
  uint64_t taken_bytes = 0;
  mc_handle rung = 0;
  for (; taken < count; ++taken) {
    if (endpoint.settings.queue_ops != 0 && counters.in_flight >= endpoint.settings.queue_ops) break;
    const mc_op& op = ops[taken];
    counters.doorbells += op.connection != rung;
    rung = op.connection;
    taken_bytes += op.length;
    Result result = start(endpoint, stream, op);
    if (result.ok()) continue;
    // What cannot even start is taken as well, and completes with its reason.
    ++counters.operations;
    ++counters.errors;
    endpoint.completions.push(op.cookie, 0, result);
  }
  *accepted = taken;
  serve(device);
  if (!manual_ && taken_bytes <= endpoint.settings.caps.inline_bytes) handle_due(lock, now());
  return taken == count ? Result{} : Result{MC_AGAIN, "the queue is full"};
}

Result Fabric::start(Endpoint& endpoint, uint64_t stream, const mc_op& op) {
  if (endpoint.closing || stopping_) return {MC_CLOSED, "the endpoint is closed"};
  auto connection = endpoint.connections.find(op.connection);
  auto remote = endpoint.remotes.find(op.remote);
  auto local = endpoint.memory.find(op.local);
  if (connection == endpoint.connections.end() || remote == endpoint.remotes.end() ||
      remote->second.connection != op.connection) {
    return {MC_INVALID, "no such connection, or no such remote region on it"};
  }
  if (local == endpoint.memory.end() || local->second->closing) {
    return {MC_INVALID, "no local memory has this handle"};
  }
  if (op.length == 0 || !local->second->contains(op.local_offset, op.length)) {
    return {MC_INVALID, "the range is outside the local memory, or empty"};
  }
  const mc_caps& caps = endpoint.settings.caps;
  if (misaligned(op, caps.alignment)) {
    return {MC_INVALID, "offsets and lengths must be multiples of " + std::to_string(caps.alignment)};
  }
  if (caps.max_op_bytes != 0 && op.length > caps.max_op_bytes) {
    return {MC_INVALID, "one operation moves at most " + std::to_string(caps.max_op_bytes) + " bytes"};
  }
  auto operation = std::make_shared<Operation>(
      Operation{op, &endpoint, connection->second, remote->second, local->second, stream});
  endpoint.operations.emplace(op.cookie, operation);
  endpoint.device->waiting.push_back(std::move(operation));
  count_start(endpoint, op.length);
  return {};
}

void Fabric::count_start(Endpoint& endpoint, uint64_t bytes) {
  Counters& counters = endpoint.device->counters;
  ++counters.operations;
  ++counters.in_flight;
  counters.in_flight_bytes += bytes;
  counters.in_flight_max = std::max(counters.in_flight_max, counters.in_flight);
  counters.in_flight_bytes_max = std::max(counters.in_flight_bytes_max, counters.in_flight_bytes);
}

// ---- served

void Fabric::serve(Device& device) {
  while (!device.serving && !device.waiting.empty()) {
    auto next = device.waiting.begin();
    if (device.behaviour.reorder) {
      next += static_cast<std::ptrdiff_t>(random_() % device.waiting.size());
    }
    std::shared_ptr<Operation> operation = std::move(*next);
    device.waiting.erase(next);
    if (!operation->ended) serve_one(device, operation);
  }
}

void Fabric::serve_one(Device& device, const std::shared_ptr<Operation>& operation) {
  const Behaviour& near = device.behaviour;
  const Behaviour& far = this->device(operation->connection.peer_device).behaviour;
  if (near.record && operation->notice.empty()) {
    const mc_op& op = operation->op;
    if (device.served.size() == kServedKept) device.served.pop_front();
    device.served.push_back({operation->connection.peer_device, op.opcode, operation->remote.region_id,
                             op.local_offset, op.remote_offset, op.length, operation->stream});
  }
  double bandwidth = narrower(near.bandwidth, far.bandwidth);
  uint64_t free_at = now();
  if (bandwidth != 0) {
    free_at += nanoseconds(static_cast<double>(operation->op.length) / bandwidth);
    device.serving = true;
    at(free_at, {nullptr, &device});
  }
  double delay_s = near.latency_s + far.latency_s;
  if (!operation->notice.empty()) delay_s += near.notice_delay_s;
  double jitter_s = near.jitter_s + far.jitter_s;
  if (jitter_s != 0) delay_s += std::uniform_real_distribution(0.0, jitter_s)(random_);
  at(free_at + nanoseconds(delay_s), {operation, nullptr});
}

// ---- delivered

Endpoint* Fabric::target(const Operation& operation) const {
  auto found = endpoints_.find(operation.connection.peer_endpoint);
  return found == endpoints_.end() ? nullptr : found->second;
}

// Whether this operation is one that goes wrong: one of the next few, or by chance.
bool Fabric::draw(uint64_t& left, double rate) {
  if (left > 0) {
    --left;
    return true;
  }
  return rate > 0 && std::uniform_real_distribution(0.0, 1.0)(random_) < rate;
}

void Fabric::deliver(Lock& lock, const std::shared_ptr<Operation>& operation) {
  if (operation->ended) return;
  if (operation->running) return move(lock, operation);
  Device& near = *operation->from->device;
  const std::string& peer_name = operation->connection.peer_device;
  if (near.behaviour.frozen || device(peer_name).behaviour.frozen) {
    held_.push_back(operation);
    return;
  }
  Endpoint* peer = target(*operation);
  if (!near.behaviour.alive || peer == nullptr || !peer->device->behaviour.alive) {
    const std::string& dead = near.behaviour.alive ? peer_name : near.name;
    return end(operation, 0, {MC_UNREACHABLE, "device " + dead + " does not answer"});
  }
  if (!link_up(near.name, peer_name)) {
    return end(operation, 0,
               {MC_UNREACHABLE, "the link between " + near.name + " and " + peer_name + " is down"});
  }
  if (!operation->notice.empty()) return deliver_notice(operation, *peer);
  if (draw(near.behaviour.lose_next, near.behaviour.loss)) {
    ++near.counters.lost;  // it stays among the endpoint's operations until somebody ends it
    return;
  }
  if (draw(near.behaviour.fail_next, near.behaviour.error_rate)) {
    return end(operation, 0, {static_cast<mc_status>(near.behaviour.error_status), "an injected error"});
  }
  admit(lock, operation, *peer);
}

void Fabric::admit(Lock& lock, const std::shared_ptr<Operation>& operation, Endpoint& target) {
  const mc_op& op = operation->op;
  std::shared_ptr<Memory> theirs;
  for (auto& [handle, memory] : target.memory) {
    if (memory->region_id() == operation->remote.region_id) theirs = memory;
  }
  int key = -1;
  Result admitted{MC_REFUSED, "no such region"};
  if (theirs) {
    admitted = theirs->admit(operation->remote.key, static_cast<mc_opcode>(op.opcode), op.remote_offset,
                             op.length, &key);
  }
  if (!admitted.ok()) {
    ++target.device->counters.refused;
    return end(operation, 0, admitted);
  }
  operation->theirs = std::move(theirs);
  operation->key = static_cast<size_t>(key);
  operation->running = true;
  ++operation->from->running;
  ++operation->theirs->keys()[operation->key].uses;
  if (!target.device->behaviour.holding) return move(lock, operation);
  inside_.push_back(operation);
}

void Fabric::move(Lock& lock, const std::shared_ptr<Operation>& operation) {
  const mc_op& op = operation->op;
  const std::shared_ptr<Memory>& theirs = operation->theirs;
  Device& near = *operation->from->device;
  bool spoilt = draw(near.behaviour.corrupt_next, near.behaviour.corrupt_rate);
  bool reads = op.opcode == MC_READ;
  const Memory& to = reads ? *operation->local : *theirs;
  uint64_t to_offset = reads ? op.local_offset : op.remote_offset;
  const Memory& from = reads ? *theirs : *operation->local;
  uint64_t from_offset = reads ? op.remote_offset : op.local_offset;
  uint64_t spoilt_at = to_offset + (spoilt ? random_() % op.length : 0);
  near.counters.corrupted += spoilt;
  lock.unlock();
  Result moved = move_bytes(to, to_offset, from, from_offset, op.length);
  char byte = 0;
  if (spoilt && moved.ok() && to.load(spoilt_at, &byte, 1)) {
    byte = static_cast<char>(byte ^ 0x10);
    to.store(spoilt_at, &byte, 1);
  }
  lock.lock();
  leave(*operation);
  end(operation, moved.ok() ? op.length : 0, moved);
  changed_.notify_all();  // for those who wait until nobody uses this memory
}

// ---- ended

void Fabric::leave(Operation& operation) {
  --operation.theirs->keys()[operation.key].uses;
  --operation.from->running;
  operation.running = false;
}

void Fabric::end(const std::shared_ptr<Operation>& operation, uint64_t bytes, const Result& result) {
  operation->ended = true;
  operation->failed = !result.ok();
  operation->behind.clear();
  Endpoint& endpoint = *operation->from;
  Counters& counters = endpoint.device->counters;
  --counters.in_flight;
  counters.in_flight_bytes -= operation->op.length;
  ++(result.ok() ? counters.completed : counters.errors);
  (operation->op.opcode == MC_READ ? counters.bytes_read : counters.bytes_written) += bytes;
  auto connection = endpoint.connections.find(operation->op.connection);
  if (operation->failed && operation->notice.empty() && connection != endpoint.connections.end())
    connection->second.failed.push_back(operation->op.cookie);
  endpoint.completions.push(operation->op.cookie, bytes, result);
  auto [first, last] = endpoint.operations.equal_range(operation->op.cookie);
  endpoint.operations.erase(
      std::find_if(first, last, [&](const auto& entry) { return entry.second == operation; }));
  if (!notices_.empty()) release_waiting_notices();
}

void Fabric::end_matching(const std::function<bool(const Operation&)>& matches, const Result& result) {
  std::vector<std::shared_ptr<Operation>> ending;
  for (auto& [name, known] : devices_) {
    if (known->endpoint == nullptr) continue;
    for (auto& [cookie, operation] : known->endpoint->operations) {
      if (!operation->running && matches(*operation)) ending.push_back(operation);
    }
  }
  for (const auto& operation : ending) end(operation, 0, result);
}

void Fabric::cancel(Endpoint& endpoint, uint64_t cookie) {
  std::lock_guard lock(mutex_);
  ++endpoint.device->counters.cancels;
  std::vector<std::shared_ptr<Operation>> ending;
  auto [first, last] = endpoint.operations.equal_range(cookie);
  for (auto entry = first; entry != last; ++entry) {
    if (!entry->second->running) ending.push_back(entry->second);
  }
  for (const auto& operation : ending) end(operation, 0, {MC_CANCELLED, "cancelled"});
}

}  // namespace mooncake::fake
