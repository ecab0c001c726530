#include "copy_pool.hpp"

#include <algorithm>
#include <cassert>
#include <system_error>
#include <utility>

#include "initiator.hpp"

namespace mooncake::shm {

Status CopyPool::start() {
  try {
    for (uint32_t i = 0; i < options_.workers; ++i) threads_.emplace_back([this] { work(); });
  } catch (const std::system_error& error) {
    stop();
    return failed(MC_NO_MEMORY, std::string("cannot start a copy thread: ") + error.what());
  }
  return {};
}

void CopyPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ready_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void CopyPool::add(const std::shared_ptr<Operation>& operation) {
  std::lock_guard lock(mutex_);
  operation->place = active_.emplace(operation->cookie, operation);
}

void CopyPool::run(const std::shared_ptr<Operation>& operation, std::shared_ptr<const Access> access) {
  Status in_range = access->check_range(operation->remote_offset, operation->length);
  if (!in_range.ok()) return end(operation, in_range);
  {
    std::lock_guard lock(mutex_);
    if (operation->finished) return;
    operation->access = std::move(access);
    (operation->length <= options_.chunk_bytes ? short_ : long_).push_back(operation);
  }
  ready_.notify_one();
}

void CopyPool::end(const std::shared_ptr<Operation>& operation, const Status& status) {
  {
    std::lock_guard lock(mutex_);
    if (!request_end(*operation, status)) return;
  }
  complete(*operation);
}

void CopyPool::end_cookie(uint64_t cookie, const Status& status) {
  std::vector<std::shared_ptr<Operation>> ended;
  {
    std::lock_guard lock(mutex_);
    for (auto next = active_.lower_bound(cookie); next != active_.end() && next->first == cookie;) {
      std::shared_ptr<Operation> operation = (next++)->second;  // before request_end() takes it off the map
      if (request_end(*operation, status)) ended.push_back(std::move(operation));
    }
  }
  for (const auto& operation : ended) complete(*operation);
}

void CopyPool::end_connection(const Connection& connection, const Status& status) {
  std::vector<std::shared_ptr<Operation>> ended;
  {
    std::lock_guard lock(mutex_);
    for (auto next = active_.begin(); next != active_.end();) {
      std::shared_ptr<Operation> operation = (next++)->second;
      if (operation->connection.get() != &connection) continue;
      if (request_end(*operation, status)) ended.push_back(std::move(operation));
    }
  }
  for (const auto& operation : ended) complete(*operation);
}

void CopyPool::work() {
  prepare_thread("mc-shm-copy");
  std::unique_lock lock(mutex_);
  Piece piece;
  while (next_piece(lock, piece)) {
    lock.unlock();
    const Operation& operation = *piece.operation;
    Stores stores = operation.length >= options_.streaming_bytes ? Stores::kStreaming : Stores::kCached;
    Status status =
        operation.access->move(operation.opcode, *operation.local, operation.local_offset + piece.offset,
                               operation.remote_offset + piece.offset, piece.length, stores);
    finish_piece(piece, std::move(status));
    piece.operation.reset();
    lock.lock();
  }
}

bool CopyPool::next_piece(std::unique_lock<std::mutex>& lock, Piece& piece) {
  for (;;) {
    ready_.wait(lock, [this] { return stopping_ || !short_.empty() || !long_.empty(); });
    if (stopping_) return false;
    auto& queue = next_queue();
    std::shared_ptr<Operation> operation = std::move(queue.front());
    queue.pop_front();
    if (operation->claimed == operation->length) continue;  // ended meanwhile
    piece.offset = operation->claimed;
    piece.length = std::min(options_.chunk_bytes, operation->length - operation->claimed);
    operation->claimed += piece.length;
    ++operation->pieces_running;
    if (operation->claimed < operation->length) {
      // To the back of the queue: others have their turn, and idle workers join in.
      queue.push_back(operation);
      ready_.notify_one();
    }
    piece.operation = std::move(operation);
    return true;
  }
}

std::deque<std::shared_ptr<Operation>>& CopyPool::next_queue() {
  if (short_.empty()) return long_;
  if (long_.empty()) return short_;
  long_is_next_ = !long_is_next_;
  return long_is_next_ ? long_ : short_;
}

void CopyPool::finish_piece(const Piece& piece, Status status) {
  Operation& operation = *piece.operation;
  {
    std::lock_guard lock(mutex_);
    assert(operation.pieces_running > 0);
    --operation.pieces_running;
    if (status.ok()) {
      operation.moved += piece.length;
    } else {
      if (operation.failure.ok()) operation.failure = std::move(status);
      operation.claimed = operation.length;
    }
    if (!close_if_done(operation)) return;
  }
  complete(operation);
}

bool CopyPool::request_end(Operation& operation, const Status& status) {
  // Every byte is with a worker and nothing is left to stop: it completes with its own result.
  bool too_late = operation.claimed == operation.length && operation.pieces_running > 0;
  if (operation.finished || too_late) return false;
  if (operation.failure.ok()) operation.failure = status;
  operation.claimed = operation.length;
  return close_if_done(operation);
}

bool CopyPool::close_if_done(Operation& operation) {
  if (operation.finished || operation.pieces_running > 0 || operation.claimed < operation.length)
    return false;
  operation.finished = true;
  active_.erase(operation.place);
  return true;
}

void CopyPool::complete(Operation& operation) {
  Status status = std::move(operation.failure);
  // A mapping outlives its owner: bytes copied from or to the memory of a dead process must not look like
  // success.
  if (status.ok()) status = operation.access->check_alive();
  completions_.push({operation.cookie, operation.opcode, operation.moved, std::move(status)});
}

}  // namespace mooncake::shm
