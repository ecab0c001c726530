// Notices to peers: writes with immediate data into places that the peer has for them, behind the bytes of
// the operations before.
#include <algorithm>
#include <utility>

#include "initiator.hpp"

namespace mooncake::verbs {
namespace {

constexpr size_t kSlots = 64;  // notices on their way, of one endpoint

}  // namespace

Status Initiator::prepare_notices() {
  notice_bytes_.resize(kSlots * MC_NOTICE_MAX);
  for (uint32_t slot = 0; slot < kSlots; ++slot) notice_slots_.push_back(slot);
  MemoryRange range{reinterpret_cast<uint64_t>(notice_bytes_.data()), notice_bytes_.size()};
  return Registration::make(*device_, options_, range, ibv::kLocalWrite, notice_memory_);
}

Status Initiator::notify(Connection& connection, const void* data, size_t length, uint64_t cookie) {
  std::lock_guard lock(mutex_);
  if (notice_slots_.empty() || completions_.reserve(1) == 0)
    return failed(MC_AGAIN, "as many notices are on their way as there can be; fetch completions first");
  uint32_t slot = notice_slots_.back();
  notice_slots_.pop_back();
  std::memcpy(&notice_bytes_[slot * MC_NOTICE_MAX], data, length);
  uint32_t index = operations_.take();
  Operation& operation = operations_[index];
  operation = {};
  operation.cookie = cookie;
  operation.total = 1;
  operation.local_offset = slot;
  operation.connection = &connection;
  operation.link = operation.merged = kNone;
  operation.slice = static_cast<uint32_t>(length);
  operation.epoch = connection.epoch++;
  operation.opcode = kNotice;
  operation.busy = true;
  connection.notices.push_back({index, connection.unposted, {}});
  // A write that failed before, of which the engine has not been told yet when it asks for the notice.
  if (connection.failed_write > polled_)
    connection.notices.back().failed = failed(MC_UNREACHABLE, "its completion tells why");
  ++connection.operations;
  connection.visited = true;
  if (connection.state == State::kReady) {
    touch(connection);
  } else {
    ask_for_control(connection);
  }
  pump_touched();
  deliver();
  return {};
}

// One operation less is not posted: what those notices that came after it wait for.
void Initiator::count_down(Connection& connection, const Operation& operation) {
  for (Notice& notice : connection.notices) {
    if (operations_[notice.operation].epoch >= operation.epoch) --notice.waits;
  }
  if (connection.notices.front().waits > 0) return;
  if (connection.state == State::kReady) {
    touch(connection);
  } else {
    ask_for_control(connection);
  }
}

// What was posted is begun anew, on other queue pairs.
void Initiator::return_to_queue(Connection& connection, Operation& operation) {
  bool counted = std::exchange(operation.unposted, true);
  if (!counted) ++connection.unposted;
  for (Notice& notice : connection.notices) {
    notice.marked = false;
    if (!counted && operations_[notice.operation].epoch >= operation.epoch) ++notice.waits;
  }
}

void Initiator::fail_notices(Connection& connection, const Operation& operation, const Status& status) {
  for (Notice& notice : connection.notices) {
    if (operations_[notice.operation].epoch >= operation.epoch) notice.failed = status;
  }
}

// The queue pair that has what is left of the operations before a notice, or any if nothing is. Null when two
// have, or when it has no room.
QueuePair* Initiator::way_of(const Connection& connection, const Notice& notice) {
  QueuePair* way = nullptr;
  QueuePair* any = nullptr;
  for (size_t i = 0; i < connection.qps.size(); ++i) {
    QueuePair& qp = *connection.qps[i];
    bool room = qp.room() > 0 && qp.has_place();
    if (room && any == nullptr) any = &qp;
    if (qp.done_before(notice.marks[i])) continue;
    if (way != nullptr || !room) return nullptr;
    way = &qp;
  }
  return way != nullptr ? way : any;
}

void Initiator::post_notices(Connection& connection) {
  while (!connection.notices.empty()) {
    Notice& first = connection.notices.front();
    uint32_t index = first.operation;
    bool ready = connection.state == State::kReady;
    Status status;
    if (!first.failed.ok()) {
      status = failed(first.failed.code, "a write before the notice failed: " + first.failed.reason);
    } else if (ready && !connection.qps.front()->has_ring()) {
      status = failed(MC_UNSUPPORTED,
                      connection.name + " has no place for notices: it is older, or has many peers");
    }
    if (!status.ok()) {
      connection.notices.pop_front();
      finish(index, &status);
      continue;
    }
    if (!ready || first.waits > 0) return;
    if (!std::exchange(first.marked, true)) {
      for (size_t i = 0; i < connection.qps.size(); ++i) first.marks[i] = connection.qps[i]->tail();
    }
    if (room_ == 0 && !std::exchange(connection.stalled, true)) stalled_.push_back(&connection);
    QueuePair* qp = room_ == 0 ? nullptr : way_of(connection, first);
    if (qp == nullptr) return;
    connection.notices.pop_front();
    Operation& operation = operations_[index];
    qp->append(qp->notice(index, operation.slice, *notice_memory_, operation.local_offset * MC_NOTICE_MAX));
    operation.posted = operation.total;
    ++operation.in_flight;
    connection.in_flight_bytes += operation.slice;
    --room_;
    ++posted_;
    if (qp->chained() == kChain && !post_chains(connection)) return;
  }
}

// The peer has taken what came through one of the queue pairs.
void Initiator::took(Connection& connection, const Taken& taken) {
  std::lock_guard lock(mutex_);
  bool current = connection.state == State::kReady && taken.generation == connection.generation;
  if (!current || taken.qp >= connection.qps.size()) return;
  connection.qps[taken.qp]->peer_took(taken.count);
  pump(connection);
  deliver();
}

void Initiator::end_notices(Connection& connection, const Status& status) {
  while (!connection.notices.empty()) {
    uint32_t index = connection.notices.front().operation;
    connection.notices.pop_front();
    finish(index, &status);
  }
}

void Initiator::cancel_notices(Connection& connection, uint64_t cookie) {
  Status cancelled = failed(MC_CANCELLED, "the operation was cancelled");
  for (size_t i = 0; i < connection.notices.size();) {
    uint32_t index = connection.notices[i].operation;
    if (operations_[index].cookie != cookie) {
      ++i;
      continue;
    }
    connection.notices.erase(connection.notices.begin() + static_cast<ptrdiff_t>(i));
    finish(index, &cancelled);
  }
}

}  // namespace mooncake::verbs
