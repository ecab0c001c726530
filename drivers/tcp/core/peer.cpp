#include "peer.hpp"

#include <algorithm>
#include <cassert>

#include "outgoing.hpp"

namespace mooncake_tcp {

namespace {
constexpr uint64_t kRetryNs = 1'000'000'000;
}

std::shared_ptr<Peer> Peer::make(EndpointAddress address, Surroundings& surroundings, size_t first_worker) {
  std::shared_ptr<Peer> peer(new Peer(std::move(address), surroundings));
  auto& workers = surroundings.workers;
  for (size_t i = 0; i < peer->lanes_.size(); ++i) {
    Worker& worker = *workers[(first_worker + i) % workers.size()];
    peer->lanes_[i].connection = std::make_unique<Outgoing>(worker, *peer, i);
  }
  return peer;
}

Peer::Peer(EndpointAddress address, Surroundings& surroundings)
    : address_(std::move(address)), surroundings_(surroundings), lanes_(surroundings.options.connections) {}

Peer::~Peer() = default;

void Peer::submit(std::vector<std::shared_ptr<Operation>> operations) {
  std::vector<Outgoing*> woken;
  {
    std::lock_guard lock(mutex_);
    for (auto& operation : operations) {
      waiting_bytes_ += operation->length;
      live_.emplace(operation->cookie, operation);
      waiting_.push_back(std::move(operation));
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
  return chosen;
}

std::vector<Outgoing*> Peer::engaged() const {
  std::vector<Outgoing*> found;
  for (const Lane& lane : lanes_) {
    if (lane.engaged) found.push_back(lane.connection.get());
  }
  return found;
}

void Peer::take(uint64_t room, size_t count, std::vector<Slice>* slices) {
  std::lock_guard lock(mutex_);
  uint64_t slice_bytes = surroundings_.options.slice_bytes;
  // Leaves the others their part, so that a transfer that fits one window still uses every connection.
  room = std::min(room, std::max(slice_bytes, waiting_bytes_ / lanes_.size()));
  for (uint64_t taken = 0; !waiting_.empty() && taken < room && slices->size() < count;) {
    Operation& operation = *waiting_.front();
    if (uint16_t refusal = operation.remote->refusal; refusal != 0 && operation.next < operation.length) {
      withdraw(operation, {MC_REFUSED, address_.hosts.front().text() + " refused: " + text_of(refusal)});
      settle(waiting_.front());
    } else if (operation.next < operation.length) {
      uint64_t length = std::min(slice_bytes, operation.length - operation.next);
      slices->push_back({waiting_.front(), operation.local + operation.next,
                         operation.remote_offset + operation.next, length});
      operation.next += length;
      ++operation.in_flight;
      waiting_bytes_ -= length;
      taken += length;
    }
    if (operation.next == operation.length) waiting_.pop_front();
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
}

// Gives no more of the operation to connections. The first reason stays.
void Peer::withdraw(Operation& operation, const Status& status) {
  if (operation.failure.ok()) operation.failure = status;
  waiting_bytes_ -= operation.length - operation.next;
  operation.next = operation.length;
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
  }
  if (!sweep) return;
  for (Lane& lane : lanes_) lane.connection->sweep_soon();
}

void Peer::disconnect() {
  {
    std::lock_guard lock(mutex_);
    fail_waiting({MC_CLOSED, "disconnected"});
  }
  for (Lane& lane : lanes_) lane.connection->shut_soon();
}

void Peer::lost(size_t index, const Status& status, bool was_ready) {
  std::vector<Outgoing*> woken;
  {
    std::lock_guard lock(mutex_);
    lanes_[index].engaged = false;
    if (!was_ready) lanes_[index].retry_at_ns = now_ns() + kRetryNs;
    if (waiting_.empty()) return;
    woken = engaged();
    if (woken.empty() && was_ready && status.code != MC_CLOSED) {
      // What waits has not been tried yet; the peer may take a new connection.
      lanes_[index].engaged = true;
      woken.push_back(lanes_[index].connection.get());
    } else if (woken.empty()) {
      fail_waiting(status);
    }
  }
  for (Outgoing* connection : woken) connection->kick();
}

void Peer::fail_waiting(const Status& status) {
  std::deque<std::shared_ptr<Operation>> waiting;
  waiting.swap(waiting_);
  for (const auto& operation : waiting) {
    if (operation->next == operation->length) continue;  // it ended before and only lingered
    withdraw(*operation, status);
    settle(operation);
  }
}

}  // namespace mooncake_tcp
