#include "peer.hpp"

#include <algorithm>
#include <cassert>

#include "outgoing.hpp"

namespace mooncake_tcp {

namespace {
constexpr uint64_t kRetryNs = 1'000'000'000;
}

std::shared_ptr<Peer> Peer::make(EndpointAddress address, uint64_t session, Surroundings& surroundings,
                                 size_t first_worker) {
  std::shared_ptr<Peer> peer(new Peer(std::move(address), session, surroundings));
  auto& workers = surroundings.workers;
  for (size_t i = 0; i < peer->lanes_.size(); ++i) {
    Worker& worker = *workers[(first_worker + i) % workers.size()];
    peer->lanes_[i].connection = std::make_unique<Outgoing>(worker, *peer, i);
  }
  return peer;
}

Peer::Peer(EndpointAddress address, uint64_t session, Surroundings& surroundings)
    : address_(std::move(address)),
      session_(session),
      surroundings_(surroundings),
      lanes_(surroundings.options.connections) {}

Peer::~Peer() = default;

void Peer::submit(std::vector<std::shared_ptr<Operation>> operations) {
  std::vector<Outgoing*> woken;
  {
    std::lock_guard lock(mutex_);
    for (auto& operation : operations) {
      waiting_bytes_ += operation->length;
      live_.emplace(operation->cookie, operation);
      operation->order = next_order_++;
      auto& queue = operation->opcode == MC_WRITE ? writes_ : reads_;
      queue.operations.push_back(std::move(operation));
    }
    woken = engage_for_waiting();
  }
  for (Outgoing* connection : woken) connection->kick();
}

// As many connections as there are slices waiting: those that are up first, the least loaded of them first.
std::vector<Outgoing*> Peer::engage_for_waiting() {
  uint64_t slice = surroundings_.options.slice_bytes;
  size_t wanted = std::clamp<uint64_t>((waiting_bytes_ + slice - 1) / slice, 1, lanes_.size());
  uint64_t now = now_ns();
  struct Candidate {
    int rank;
    uint64_t load;  // copied: it changes while we sort
    Lane* lane;
  };
  std::vector<Candidate> order;
  for (Lane& lane : lanes_) {
    order.push_back({lane.engaged ? 0 : lane.retry_at_ns <= now ? 1 : 2, lane.connection->load(), &lane});
  }
  std::stable_sort(order.begin(), order.end(), [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.load < b.load;
  });
  std::vector<Outgoing*> chosen;
  for (const Candidate& candidate : order) {
    // One that failed a moment ago is only tried when there is no other.
    if (chosen.size() == wanted || (candidate.rank == 2 && !chosen.empty())) break;
    candidate.lane->engaged = true;
    chosen.push_back(candidate.lane->connection.get());
  }
  for (Lane& lane : lanes_) {
    // Only its next welcome, or its failure, ends the wait of writes.
    if (!lane.writes_lost || lane.engaged || writes_.operations.empty()) continue;
    lane.engaged = true;
    chosen.push_back(lane.connection.get());
  }
  return chosen;
}

std::vector<Outgoing*> Peer::engaged() const {
  std::vector<Outgoing*> found;
  for (const Lane& lane : lanes_) {
    if (lane.engaged) found.push_back(lane.connection.get());
  }
  return found;
}

bool Peer::may_write(size_t index) const {
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (i != index && lanes_[i].fenced()) return false;
  }
  return true;
}

// The queue whose first operation came first; nullptr when there is none.
Peer::Queue* Peer::next_queue(bool may_write) {
  for (Queue* queue : {&reads_, &writes_}) {
    while (!queue->operations.empty() &&
           queue->operations.front()->next == queue->operations.front()->length) {
      queue->operations.pop_front();
      --queue->ended;
    }
  }
  bool read = !reads_.operations.empty();
  if (!may_write || writes_.operations.empty()) return read ? &reads_ : nullptr;
  if (!read) return &writes_;
  return reads_.operations.front()->order < writes_.operations.front()->order ? &reads_ : &writes_;
}

void Peer::Queue::tidy() {
  if (ended * 2 < operations.size() || ended == 0) return;
  std::erase_if(operations, [](const auto& operation) { return operation->next == operation->length; });
  ended = 0;
}

void Peer::take(size_t index, uint64_t room, size_t count, std::vector<Slice>* slices) {
  std::lock_guard lock(mutex_);
  bool writes = may_write(index);
  uint64_t slice_bytes = surroundings_.options.slice_bytes;
  // Leaves the others their part, so that a transfer that fits one window still uses every connection.
  room = std::min(room, std::max(slice_bytes, waiting_bytes_ / lanes_.size()));
  for (uint64_t taken = 0; taken < room && slices->size() < count;) {
    Queue* queue = next_queue(writes);
    if (queue == nullptr) return;
    const auto& front = queue->operations.front();
    Operation& operation = *front;
    if (uint16_t refusal = operation.remote->refusal; refusal != 0) {
      withdraw(operation, {MC_REFUSED, address_.hosts.front().text() + " refused: " + text_of(refusal)});
      settle(front);
      continue;
    }
    uint64_t length = std::min(slice_bytes, operation.length - operation.next);
    slices->push_back(
        {front, operation.local + operation.next, operation.remote_offset + operation.next, length});
    operation.next += length;
    ++operation.in_flight;
    waiting_bytes_ -= length;
    taken += length;
    if (operation.next == operation.length) queue->operations.pop_front();
  }
}

void Peer::slice_done(const Slice& slice) {
  std::lock_guard lock(mutex_);
  slice.operation->moved += slice.length;
  --slice.operation->in_flight;
  settle(slice.operation);
}

void Peer::slice_failed(const Slice& slice, const Status& status) {
  std::lock_guard lock(mutex_);
  withdraw(*slice.operation, status);
  --slice.operation->in_flight;
  settle(slice.operation);
  reads_.tidy();
  writes_.tidy();
}

// Gives no more of the operation to connections. The first reason stays.
void Peer::withdraw(Operation& operation, const Status& status) {
  if (operation.failure.ok()) operation.failure = status;
  if (operation.next == operation.length) return;
  waiting_bytes_ -= operation.length - operation.next;
  operation.next = operation.length;
  ++(operation.opcode == MC_WRITE ? writes_ : reads_).ended;
}

// Completes the operation when no connection has any of it.
void Peer::settle(const std::shared_ptr<Operation>& operation) {
  if (operation->in_flight != 0 || operation->next != operation->length) return;
  auto [first, last] = live_.equal_range(operation->cookie);
  auto found = std::find_if(first, last, [&](const auto& entry) { return entry.second == operation; });
  assert(found != last);
  live_.erase(found);
  Counters& counters = surroundings_.counters;
  auto& bytes = operation->opcode == MC_READ ? counters.bytes_read : counters.bytes_written;
  bytes.fetch_add(operation->moved, std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  if (!operation->failure.ok()) counters.errors.fetch_add(1, std::memory_order_relaxed);
  operation->use.release();
  surroundings_.completions.push(operation->cookie, operation->moved, operation->failure);
}

void Peer::cancel(uint64_t cookie) {
  bool sweep = false;
  {
    std::lock_guard lock(mutex_);
    auto [first, last] = live_.equal_range(cookie);
    std::vector<std::shared_ptr<Operation>> found;
    for (auto entry = first; entry != last; ++entry) found.push_back(entry->second);
    for (const auto& operation : found) {
      withdraw(*operation, {MC_CANCELLED, "cancelled"});
      if (operation->in_flight != 0) {
        operation->dropped = true;
        sweep = true;
      }
      settle(operation);
    }
    reads_.tidy();
    writes_.tidy();
  }
  if (!sweep) return;
  for (Lane& lane : lanes_) lane.connection->sweep_soon();
}

void Peer::disconnect() {
  {
    std::lock_guard lock(mutex_);
    for (Queue* queue : {&reads_, &writes_}) fail_waiting(*queue, {MC_CLOSED, "disconnected"});
  }
  for (Lane& lane : lanes_) lane.connection->shut_soon();
}

void Peer::lost(size_t index, const Status& status, bool was_ready) {
  std::vector<Outgoing*> woken;
  {
    std::lock_guard lock(mutex_);
    lanes_[index].engaged = false;
    if (!was_ready) lanes_[index].retry_at_ns = now_ns() + kRetryNs;
    if (idle()) return;
    woken = engaged();
    bool holds_writes = lanes_[index].writes_lost && !writes_.operations.empty();
    if ((woken.empty() || holds_writes) && was_ready && status.code != MC_CLOSED) {
      // What waits has not been tried yet; the peer may take a new connection.
      lanes_[index].engaged = true;
      woken.push_back(lanes_[index].connection.get());
    } else if (woken.empty()) {
      for (Queue* queue : {&reads_, &writes_}) fail_waiting(*queue, status);
    } else if (holds_writes) {
      fail_waiting(writes_, status);  // the fence stands, and none of the other connections may take them
    }
  }
  for (Outgoing* connection : woken) connection->kick();
}

void Peer::write_dropped(size_t index) {
  std::lock_guard lock(mutex_);
  ++lanes_[index].dropped_writes;
}

void Peer::writes_lost(size_t index) {
  std::lock_guard lock(mutex_);
  lanes_[index].dropped_writes = 0;
  lanes_[index].writes_lost = true;
}

void Peer::dropped_write_answered(size_t index) {
  {
    std::lock_guard lock(mutex_);
    if (--lanes_[index].dropped_writes != 0) return;
  }
  wake_for_waiting();
}

void Peer::welcomed(size_t index) {
  {
    std::lock_guard lock(mutex_);
    if (!std::exchange(lanes_[index].writes_lost, false)) return;
  }
  wake_for_waiting();
}

// A fence is gone: those that were kicked for what waits behind it, and found nothing to take, come again.
void Peer::wake_for_waiting() {
  std::vector<Outgoing*> woken;
  {
    std::lock_guard lock(mutex_);
    if (writes_.operations.empty()) return;
    woken = engage_for_waiting();
  }
  for (Outgoing* connection : woken) connection->kick();
}

void Peer::fail_waiting(Queue& queue, const Status& status) {
  std::deque<std::shared_ptr<Operation>> waiting;
  waiting.swap(queue.operations);
  for (const auto& operation : waiting) {
    if (operation->next == operation->length) continue;  // it ended before and only lingered
    withdraw(*operation, status);
    settle(operation);
  }
  queue.ended = 0;
}

}  // namespace mooncake_tcp
