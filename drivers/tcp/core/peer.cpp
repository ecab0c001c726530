#include "peer.hpp"

#include <algorithm>

#include "outgoing.hpp"

namespace mooncake_tcp {

namespace {
constexpr uint64_t kRetryNs = 1'000'000'000;
// Larger ones are bulk, ...
constexpr uint64_t kSmallBytes = 64 << 10;
// ... but for one on the same host, of up to so many bytes, while nothing else is under way: there the thread
// that submits copies it to the socket in less time than waking a worker and hearing of the end takes.
constexpr uint64_t kAloneBytes = 1 << 20;
// Small operations of more than so many bytes are worth waking a worker.
constexpr uint64_t kManySmallBytes = 1 << 20;
}  // namespace

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
      near_(std::any_of(address_.hosts.begin(), address_.hosts.end(),
                        [&](const auto& host) { return is_same_host(host, surroundings.own_hosts); })),
      lanes_(surroundings.options.connections + 1) {}

Peer::~Peer() = default;

void Peer::submit(std::vector<std::shared_ptr<Operation>> operations) {
  std::vector<Outgoing*> woken;
  {
    std::lock_guard lock(mutex_);
    for (auto& operation : operations) {
      operation->bulk = is_bulk(operation->length);
      waiting_bytes_ += operation->length;
      if (operation->bulk) waiting_bulk_bytes_ += operation->length;
      live_.add(operation);
      operation->order = next_order_++;
      auto& queue = queue_of(*operation);
      queue.operations.push_back(std::move(operation));
    }
    woken = engage_for_waiting();
  }
  // The workers first: they take their part while this thread takes its own.
  for (Outgoing* connection : woken) {
    if (!connection->is_hosted()) connection->kick();
  }
  for (Outgoing* connection : woken) {
    if (connection->is_hosted()) connection->kick_here();
  }
}

bool Peer::is_bulk(uint64_t length) const {
  if (length <= kSmallBytes) return false;
  if (!near_ || surroundings_.options.tls != nullptr) return true;
  uint64_t under_way = waiting_bytes_;
  for (const Lane& lane : lanes_) under_way += lane.connection->load();
  return under_way + length > kAloneBytes;
}

// As many connections as there are slices waiting: those that are up first, the least loaded of them first.
// The first connection is for small operations, the others are for bulk and for large amounts.
std::vector<Outgoing*> Peer::engage_for_waiting() {
  uint64_t slice = surroundings_.options.slice_bytes;
  uint64_t small_bytes = waiting_bytes_ - waiting_bulk_bytes_;
  std::vector<Outgoing*> chosen;
  auto engage = [&chosen](Lane& lane) {
    lane.engaged = true;
    chosen.push_back(lane.connection.get());
  };
  uint64_t bulk_bytes = waiting_bulk_bytes_ + (small_bytes > kManySmallBytes ? small_bytes : 0);
  uint64_t now = now_ns();
  bool first_fails = lanes_[0].retry_at_ns > now && !lanes_[0].engaged;
  if (small_bytes != 0 && !first_fails) engage(lanes_[0]);
  if (bulk_bytes == 0 && !chosen.empty()) return with_fenced(std::move(chosen));
  size_t wanted =
      chosen.size() + std::clamp<uint64_t>((bulk_bytes + slice - 1) / slice, 1, lanes_.size() - 1);
  struct Candidate {
    int rank;
    uint64_t load;  // copied: it changes while we sort
    Lane* lane;
  };
  std::vector<Candidate> order;
  for (size_t i = 1; i < lanes_.size(); ++i) {
    Lane& lane = lanes_[i];
    order.push_back({lane.engaged ? 0 : lane.retry_at_ns <= now ? 1 : 2, lane.connection->load(), &lane});
  }
  std::stable_sort(order.begin(), order.end(), [](const Candidate& a, const Candidate& b) {
    return a.rank != b.rank ? a.rank < b.rank : a.load < b.load;
  });
  for (const Candidate& candidate : order) {
    // One that failed a moment ago is only tried when there is no other.
    if (chosen.size() >= wanted || (candidate.rank == 2 && !chosen.empty())) break;
    engage(*candidate.lane);
  }
  return with_fenced(std::move(chosen));
}

// Only the next welcome of a connection that lost writes, or its failure, ends the wait of other writes.
std::vector<Outgoing*> Peer::with_fenced(std::vector<Outgoing*> chosen) {
  for (Lane& lane : lanes_) {
    if (!lane.writes_lost || lane.engaged || !writes_wait()) continue;
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

// The first connection only when there is no other: the threads that poll it shall not be kept busy.
bool Peer::may_take_bulk(size_t index) const {
  if (index != 0) return true;
  return std::none_of(lanes_.begin() + 1, lanes_.end(), [](const Lane& lane) { return lane.engaged; });
}

bool Peer::writes_wait() const {
  return !writes_.small.operations.empty() || !writes_.bulk.operations.empty();
}

bool Peer::idle() const {
  return !writes_wait() && reads_.small.operations.empty() && reads_.bulk.operations.empty();
}

Peer::Queue& Peer::queue_of(const Operation& operation) {
  Queues& queues = operation.opcode == MC_WRITE ? writes_ : reads_;
  return operation.bulk ? queues.bulk : queues.small;
}

// The queue whose first operation came first; nullptr when there is none.
Peer::Queue* Peer::next_queue(bool may_write, bool may_take_bulk) {
  Queue* first = nullptr;
  auto consider = [&first](Queue& queue) {
    while (!queue.operations.empty() && queue.operations.front()->next == queue.operations.front()->length) {
      queue.operations.pop_front();
      --queue.ended;
    }
    if (queue.operations.empty()) return;
    if (first == nullptr || queue.operations.front()->order < first->operations.front()->order)
      first = &queue;
  };
  consider(reads_.small);
  if (may_take_bulk) consider(reads_.bulk);
  if (may_write) consider(writes_.small);
  if (may_write && may_take_bulk) consider(writes_.bulk);
  return first;
}

void Peer::tidy() {
  for (Queues* queues : {&reads_, &writes_}) {
    queues->small.tidy();
    queues->bulk.tidy();
  }
}

void Peer::Queue::tidy() {
  if (ended * 2 < operations.size() || ended == 0) return;
  operations.erase_if([](const auto& operation) { return operation->next == operation->length; });
  ended = 0;
}

void Peer::take(size_t index, uint64_t room, size_t count, std::vector<Slice>* slices) {
  std::lock_guard lock(mutex_);
  bool writes = may_write(index);
  bool take_bulk = may_take_bulk(index);
  uint64_t slice_bytes = surroundings_.options.slice_bytes;
  // Leaves the others their part, so that a transfer that fits one window still uses every connection.
  size_t sharing = std::count_if(lanes_.begin(), lanes_.end(), [](const Lane& lane) { return lane.engaged; });
  room = std::min(room, std::max(slice_bytes, waiting_bytes_ / std::max<size_t>(sharing, 1)));
  for (uint64_t taken = 0; taken < room && slices->size() < count;) {
    Queue* queue = next_queue(writes, take_bulk);
    if (queue == nullptr) return;
    const auto front = queue->operations.front();
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
    if (operation.bulk) waiting_bulk_bytes_ -= length;
    taken += length;
    if (operation.next == operation.length) queue->operations.pop_front();
  }
}

void Peer::slices_done(const std::vector<Slice>& slices) {
  std::lock_guard lock(mutex_);
  for (const Slice& slice : slices) {
    slice.operation->moved += slice.length;
    --slice.operation->in_flight;
    finish(slice.operation, &completed_);
  }
  surroundings_.completions.push(completed_);
  completed_.clear();
}

void Peer::slice_failed(const Slice& slice, const Status& status) {
  std::lock_guard lock(mutex_);
  withdraw(*slice.operation, status);
  --slice.operation->in_flight;
  settle(slice.operation);
  tidy();
}

// Gives no more of the operation to connections. The first reason stays.
void Peer::withdraw(Operation& operation, const Status& status) {
  if (operation.failure.ok()) operation.failure = status;
  if (operation.next == operation.length) return;
  waiting_bytes_ -= operation.length - operation.next;
  if (operation.bulk) waiting_bulk_bytes_ -= operation.length - operation.next;
  operation.next = operation.length;
  ++queue_of(operation).ended;
}

// Completes the operation when no connection has any of it.
void Peer::settle(const std::shared_ptr<Operation>& operation) {
  std::vector<Completion> completions;
  finish(operation, &completions);
  surroundings_.completions.push(completions);
}

void Peer::finish(const std::shared_ptr<Operation>& operation, std::vector<Completion>* completions) {
  if (operation->in_flight != 0 || operation->next != operation->length) return;
  auto keep = live_.remove(*operation);
  Counters& counters = surroundings_.counters;
  auto& bytes = operation->opcode == MC_READ ? counters.bytes_read : counters.bytes_written;
  bytes.fetch_add(operation->moved, std::memory_order_relaxed);
  counters.ops.fetch_add(1, std::memory_order_relaxed);
  if (!operation->failure.ok()) counters.errors.fetch_add(1, std::memory_order_relaxed);
  operation->use.release();
  completions->push_back({operation->cookie, operation->moved, operation->failure});
}

void Peer::cancel(uint64_t cookie) {
  bool sweep = false;
  {
    std::lock_guard lock(mutex_);
    auto found = live_.find(cookie);
    for (const auto& operation : found) {
      withdraw(*operation, {MC_CANCELLED, "cancelled"});
      if (operation->in_flight != 0) {
        operation->dropped = true;
        sweep = true;
      }
      settle(operation);
    }
    tidy();
  }
  if (!sweep) return;
  for (Lane& lane : lanes_) lane.connection->sweep_soon();
}

void Peer::disconnect() {
  {
    std::lock_guard lock(mutex_);
    for (Queues* queues : {&reads_, &writes_}) fail_waiting(*queues, {MC_CLOSED, "disconnected"});
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
    bool holds_writes = lanes_[index].writes_lost && writes_wait();
    if ((woken.empty() || holds_writes) && was_ready && status.code != MC_CLOSED) {
      // What waits has not been tried yet; the peer may take a new connection.
      lanes_[index].engaged = true;
      woken.push_back(lanes_[index].connection.get());
    } else if (woken.empty()) {
      for (Queues* queues : {&reads_, &writes_}) fail_waiting(*queues, status);
    } else if (holds_writes) {
      fail_waiting(writes_, status);  // the fence stands, and none of the other connections may take them
    }
  }
  for (Outgoing* connection : woken) connection->kick();
}

void Peer::write_dropped(size_t index, uint64_t generation) {
  std::lock_guard lock(mutex_);
  ++lanes_[index].dropped_writes;
  lanes_[index].generation = generation;
}

void Peer::writes_lost(size_t index, uint64_t generation) {
  std::lock_guard lock(mutex_);
  lanes_[index].dropped_writes = 0;
  lanes_[index].writes_lost = true;
  lanes_[index].generation = generation;
}

FenceToken Peer::late_writes() {
  FenceToken token;
  token.session = session_;
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < lanes_.size(); ++i) {
    if (lanes_[i].fenced()) token.lanes.push_back({static_cast<uint16_t>(i), lanes_[i].generation});
  }
  return token;
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
    if (!writes_wait()) return;
    woken = engage_for_waiting();
  }
  for (Outgoing* connection : woken) connection->kick();
}

void Peer::fail_waiting(Queues& queues, const Status& status) {
  for (Queue* queue : {&queues.small, &queues.bulk}) {
    Ring<std::shared_ptr<Operation>> waiting;
    waiting.swap(queue->operations);
    for (size_t i = 0; i < waiting.size(); ++i) {
      const auto& operation = waiting[i];
      if (operation->next == operation->length) continue;  // it ended before and only lingered
      withdraw(*operation, status);
      settle(operation);
    }
    queue->ended = 0;
  }
}

}  // namespace mooncake_tcp
