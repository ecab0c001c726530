// Notices to peers: each is posted when every operation before it is over.
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
  connection.notices.push_back({index, connection.operations, {}});
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

// An operation is over: those notices that came after it wait for one less.
void Initiator::count_down(Connection& connection, const Operation& operation, const Status* status) {
  for (Notice& notice : connection.notices) {
    if (operations_[notice.operation].epoch < operation.epoch || &operations_[notice.operation] == &operation)
      continue;
    --notice.waits;
    if (status != nullptr && operation.opcode == MC_WRITE) notice.failed = *status;
  }
  if (connection.notices.empty() || connection.notices.front().waits > 0) return;
  if (connection.state == State::kReady) {
    touch(connection);
  } else {
    ask_for_control(connection);
  }
}

void Initiator::post_notices(Connection& connection) {
  while (!connection.notices.empty() && connection.notices.front().waits == 0) {
    Notice& first = connection.notices.front();
    uint32_t index = first.operation;
    if (!first.failed.ok()) {
      Status status = failed(first.failed.code, "a write before the notice failed: " + first.failed.reason);
      connection.notices.pop_front();
      finish(index, &status);
      continue;
    }
    if (connection.state != State::kReady) return;
    QueuePair& qp = *connection.qps.front();
    if (room_ == 0 && !std::exchange(connection.stalled, true)) stalled_.push_back(&connection);
    if (room_ == 0 || qp.room() == 0) return;
    connection.notices.pop_front();
    Operation& operation = operations_[index];
    uint64_t at = operation.local_offset * MC_NOTICE_MAX;
    qp.append({index, kNotice, operation.slice, notice_memory_->lkey(0), 0, notice_memory_->iova() + at,
               notice_memory_->address() + at, 0});
    operation.posted = operation.total;
    ++operation.in_flight;
    connection.in_flight_bytes += operation.slice;
    --room_;
    ++posted_;
    if (qp.chained() == kChain && !post_chains(connection)) return;
  }
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
