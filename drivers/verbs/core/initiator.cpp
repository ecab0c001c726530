// The way of an operation: accepted, cut into slices, posted, completed. No allocation on it, but for reasons
// of failures.
#include "initiator.hpp"

#include <algorithm>
#include <utility>

namespace mooncake::verbs {
namespace {

constexpr size_t kFetch = 64;        // completions fetched from the device at once
constexpr size_t kFetchRounds = 16;  // before others get the lock

// Whether [offset, offset + length) is not empty and lies in [0, size), for any values.
bool inside(uint64_t offset, uint64_t length, uint64_t size) {
  return length > 0 && offset <= size && length <= size - offset;
}

// What is left of the chunk in which an offset lies.
uint64_t rest_of_chunk(uint64_t offset, unsigned shift) {
  return (1ull << shift) - (offset & ((1ull << shift) - 1));
}

}  // namespace

Status Initiator::start() {
  room_ = static_cast<uint32_t>(device_->cq()->cqe);
  if (room_ == 0 || room_ > options_.completion_depth) room_ = options_.completion_depth;
  room_ = std::min<uint32_t>(room_, static_cast<uint32_t>(std::max(device_->limits().max_cqe, 1)));
  fetched_.resize(kFetch);
  finished_.reserve(std::min<size_t>(options_.queue_depth, 4096));
  return prepare_notices();
}

void Initiator::accept(const mc_op& op, const Names& names) {
  if (names.status.ok() && merge(op, names)) return;
  uint32_t index = operations_.take();
  Operation& operation = operations_[index];
  operation = {};
  operation.cookie = op.cookie;
  operation.length = operation.total = op.length;
  operation.local_offset = op.local_offset;
  operation.remote_offset = op.remote_offset;
  operation.connection = names.connection;
  operation.region = names.region;
  operation.remote = names.remote;
  operation.link = operation.merged = kNone;
  operation.opcode = static_cast<uint8_t>(op.opcode);
  operation.busy = true;
  if (!names.status.ok()) {
    operation.connection = nullptr;
    return finish(index, &names.status);
  }
  operation.epoch = names.connection->epoch;
  ++names.connection->operations;
  ++names.connection->unposted;
  operation.unposted = true;
  ++names.remote->users;
  names.region->users.fetch_add(1, std::memory_order_relaxed);
  // About four slices for each queue pair are enough to keep all of them busy to the end.
  operation.slice = pace_.slice(op.length / (4 * options_.qps),
                                std::min<uint64_t>(options_.slice_bytes, device_->max_message()));
  place(index);
}

// Neighbours of one cookie become one work request; each still has its own completion.
bool Initiator::merge(const mc_op& op, const Names& names) {
  if (last_ == kNone) return false;
  Operation& first = operations_[last_];
  if (first.cookie != op.cookie || first.opcode != op.opcode || first.region != names.region ||
      first.remote != names.remote || first.local_offset + first.total != op.local_offset ||
      first.remote_offset + first.total != op.remote_offset || first.total + op.length > first.slice ||
      !inside(op.remote_offset, op.length, names.remote->opened.length)) {
    return false;
  }
  uint32_t index = operations_.take();
  operations_[index] = first;
  operations_[index].length = op.length;
  operations_[index].busy = false;
  operations_[index].merged = first.merged;
  first.merged = index;
  first.total += op.length;
  return true;
}

void Initiator::place(uint32_t index) {
  Operation& operation = operations_[index];
  Connection& connection = *operation.connection;
  Remote& remote = *operation.remote;
  last_ = kNone;
  if (connection.closing) {
    Status closed = failed(MC_CLOSED, "the connection was closed on this side");
    return finish(index, &closed);
  }
  if (remote.state == Remote::State::kRefused) {
    Status refused = failed(MC_REFUSED, remote.opened.reason);
    return finish(index, &refused);
  }
  connection.visited = true;
  if (remote.state != Remote::State::kOpen) {
    remote.parked.push(operations_, index);
    return want_answer(remote);
  }
  uint32_t needed = operation.opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
  if ((remote.opened.access & needed) == 0) {
    Status refused = failed(MC_REFUSED, "the key does not allow this direction");
    return finish(index, &refused);
  }
  if (!inside(operation.remote_offset, operation.total, remote.opened.length)) {
    Status refused = failed(MC_REFUSED, "the range is outside the peer's region");
    return finish(index, &refused);
  }
  connection.queue.push(operations_, index);
  last_ = index;
  if (connection.state == State::kReady) {
    touch(connection);
  } else {
    ask_for_control(connection);
  }
}

void Initiator::touch(Connection& connection) {
  if (std::exchange(connection.touched, true)) return;
  touched_.push_back(&connection);
}

void Initiator::pump_touched() {
  for (size_t i = 0; i < touched_.size(); ++i) {
    touched_[i]->touched = false;
    pump(*touched_[i]);
  }
  touched_.clear();
}

// The queue pair for the next slice; null when there is no room.
QueuePair* Initiator::choose(Connection& connection, uint64_t length) {
  if (room_ == 0) {
    if (!std::exchange(connection.stalled, true)) stalled_.push_back(&connection);
    return nullptr;
  }
  size_t count = connection.qps.size();
  for (size_t tried = 0; tried < count; ++tried) {
    QueuePair* qp = connection.qps[connection.next_qp].get();
    // Small ones stay together, for one doorbell; large ones take turns, so that all move at once.
    bool leave = length >= kSpread || qp->chained() + 1 == kChain;
    size_t here = connection.next_qp;
    if (qp->room() == 0 || leave) connection.next_qp = (here + 1) % count;
    if (qp->room() > 0) return qp;
  }
  return nullptr;
}

void Initiator::pump(Connection& connection) {
  if (!connection.notices.empty()) post_notices(connection);  // before others take the room
  while (connection.state == State::kReady && !connection.queue.empty()) {
    uint32_t index = connection.queue.front();
    Operation& operation = operations_[index];
    uint64_t local = operation.local_offset + operation.posted;
    uint64_t remote = operation.remote_offset + operation.posted;
    uint64_t length = std::min<uint64_t>(operation.total - operation.posted, operation.slice);
    length = std::min(length, rest_of_chunk(remote, operation.remote->opened.chunk_shift));
    const Registration& registration = *operation.region->local;
    uint64_t within = operation.region->range.address + local - registration.address();
    length = std::min(length, rest_of_chunk(within, registration.chunk_shift()));
    if (connection.in_flight_bytes > 0 && connection.in_flight_bytes + length > options_.window_bytes) break;
    QueuePair* qp = choose(connection, length);
    if (qp == nullptr) break;
    post_slice(*qp, operation, index, length);
    if (operation.posted == operation.total) {
      connection.queue.pop(operations_);
      leave_queue(connection, operation);
    }
    if (qp->chained() == kChain) {
      if (int error = qp->post(counters_); error != 0) {
        broken(connection, system_failure(MC_IO, "the device does not take a work request", error));
      }
    }
  }
  if (!connection.notices.empty()) post_notices(connection);
  if (connection.state == State::kReady) post_chains(connection);
}

void Initiator::post_slice(QueuePair& qp, Operation& operation, uint32_t index, uint64_t length) {
  const Registration& registration = *operation.region->local;
  const ImportAnswer& opened = operation.remote->opened;
  uint64_t address = operation.region->range.address + operation.local_offset + operation.posted;
  uint64_t within = address - registration.address();
  uint64_t remote = operation.remote_offset + operation.posted;
  // The processor copies what goes inline, and it does not reach memory of a GPU.
  uint64_t readable = registration.kind() == MC_DRAM ? address : 0;
  qp.append({index, operation.opcode, static_cast<uint32_t>(length), registration.lkey(within),
             opened.rkeys[remote >> opened.chunk_shift], registration.iova() + within, readable,
             opened.iova + remote});
  operation.posted += length;
  ++operation.in_flight;
  operation.connection->in_flight_bytes += length;
  pace_.posted(length);
  --room_;
  ++posted_;
}

bool Initiator::post_chains(Connection& connection) {
  for (const auto& qp : connection.qps) {
    if (qp->chained() == 0) continue;
    if (int error = qp->post(counters_); error != 0) {
      broken(connection, system_failure(MC_IO, "the device does not take a work request", error));
      return false;
    }
  }
  return true;
}

void Initiator::progress() {
  std::lock_guard lock(mutex_);
  fetch();
  deliver();
}

void Initiator::fetch(bool all) {
  ibv::Cq* cq = device_->cq();
  for (size_t round = 0; all || round < kFetchRounds; ++round) {
    int count = cq->context->ops.poll_cq(cq, static_cast<int>(kFetch), fetched_.data());
    for (int i = 0; i < count; ++i) on_completion(fetched_[static_cast<size_t>(i)]);
    if (count < static_cast<int>(kFetch)) break;
  }
  for (Connection* connection : stalled_) {
    connection->stalled = false;
    touch(*connection);
  }
  stalled_.clear();
  pace_.measure();
  pump_touched();
}

void Initiator::on_completion(const ibv::Wc& wc) {
  auto tag = static_cast<uint32_t>(wc.wr_id >> 32);
  auto position = static_cast<uint32_t>(wc.wr_id);
  QueuePair* qp = tags_.find(tag);
  // From a queue pair that is gone, or of a connection that broke: what it says counts no more.
  if (qp == nullptr) return;
  Connection& connection = *qp->connection();
  if (connection.state != State::kReady || !qp->holds(position)) return;
  bool good = wc.status == ibv::kSuccess;
  uint32_t retired =
      qp->retire(position, !good, [&](const QueuePair::Posted& posted) { slice_done(posted); });
  room_ += retired;
  posted_ -= retired;
  if (good) [[likely]] {
    connection.failures = 0;
    if (!connection.queue.empty() || !connection.notices.empty()) touch(connection);
    return;
  }
  std::string why = device_->verbs().wc_status_str(wc.status);
  mc_status code = MC_UNREACHABLE;
  // Not kRemInvReqErr: devices also say so of requests that were spoilt on their way.
  if (wc.status == ibv::kRemAccessErr) {
    code = MC_REFUSED;
    connection.culprit = qp->at(position).operation;
  } else if (wc.status == ibv::kLocLenErr || wc.status == ibv::kLocQpOpErr || wc.status == ibv::kLocProtErr) {
    code = MC_IO;
  }
  broken(connection,
         failed(code, code == MC_REFUSED ? "the peer's device refused it: " + why
                                         : device_->name() + " to " + connection.name + ": " + why));
}

void Initiator::slice_done(const QueuePair::Posted& posted) {
  Operation& operation = operations_[posted.operation];
  operation.connection->in_flight_bytes -= posted.bytes;
  pace_.done(posted.bytes);
  if (--operation.in_flight > 0 || operation.posted < operation.total) return;
  if (operation.cancelled) {
    Status cancelled = failed(MC_CANCELLED, "the operation was cancelled");
    return finish(posted.operation, &cancelled);
  }
  finish(posted.operation, nullptr);
}

void Initiator::broken(Connection& connection, Status cause) {
  if (connection.state != State::kReady) return;
  connection.state = State::kBroken;
  connection.cause = std::move(cause);
  --ready_;
  last_ = kNone;
  ask_for_control(connection);
}

void Initiator::finish(uint32_t index, const Status* status) {
  if (last_ == index) last_ = kNone;
  Operation& operation = operations_[index];
  if (operation.connection != nullptr) {
    Connection& connection = *operation.connection;
    --connection.operations;
    leave_queue(connection, operation);
    if (status != nullptr && operation.opcode == MC_WRITE) fail_notices(connection, operation, *status);
    if (operation.opcode == kNotice) {
      notice_slots_.push_back(static_cast<uint32_t>(operation.local_offset));
    } else {
      if (--operation.remote->users == 0 && operation.remote->released)
        connection.remotes.erase(operation.remote);
      regions_.release(*operation.region);
    }
    bool crowded = connection.closing || ready_ > options_.max_connections;
    if (crowded && connection.operations == 0) ask_for_control(connection);
  }
  for (uint32_t next = index; next != kNone;) {
    Completion& completion = finished_.emplace_back();
    completion.cookie = operations_[next].cookie;
    completion.opcode = static_cast<mc_opcode>(operations_[next].opcode);
    if (status == nullptr) {
      completion.bytes = operations_[next].length;
    } else {
      completion.fail(*status);
      bool write = operation.opcode == MC_WRITE && operation.connection != nullptr;
      if (write) operation.connection->failed_write = delivered_ + finished_.size();
    }
    uint32_t following = operations_[next].merged;
    operations_.give_back(next);
    next = following;
  }
}

void Initiator::deliver() {
  delivered_ += finished_.size();
  completions_.push(finished_);
  finished_.clear();
}

bool Initiator::arm() {
  std::lock_guard lock(mutex_);
  ibv::Cq* cq = device_->cq();
  // An event that nobody takes would keep the descriptor readable.
  if (notified_ && device_->take_events(device_->channel())) notified_ = false;
  // Also while nothing is posted: the control thread may post what waits for a connection or a key.
  if (!std::exchange(notified_, true)) cq->context->ops.req_notify_cq(cq, 0);
  // What completed before the request gives no event.
  uint32_t before = posted_;
  fetch();
  bool nothing = posted_ == before && finished_.empty();
  deliver();
  return nothing;
}

void Initiator::cancel(uint64_t cookie) {
  std::lock_guard lock(mutex_);
  Status cancelled = failed(MC_CANCELLED, "the operation was cancelled");
  auto named = [&](const Operation& operation) { return operation.cookie == cookie; };
  auto end = [&](uint32_t index) {
    Operation& operation = operations_[index];
    if (operation.in_flight == 0) return finish(index, &cancelled);
    // The device may still touch its memory. What was posted ends soon, and no more of it is.
    operation.cancelled = true;
    operation.total = operation.posted;
    leave_queue(*operation.connection, operation);
    if (operation.opcode == MC_WRITE) fail_notices(*operation.connection, operation, cancelled);
  };
  for (const auto& connection : connections_) {
    cancel_notices(*connection, cookie);
    connection->queue.extract(operations_, named, end);
    for (const auto& remote : remotes_of(*connection)) remote->parked.extract(operations_, named, end);
  }
  pump_touched();
  deliver();
}

Counters Initiator::counters() {
  std::lock_guard lock(mutex_);
  return counters_;
}

}  // namespace mooncake::verbs
