#include "copy_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <cassert>
#include <system_error>
#include <utility>

namespace mooncake::cxl {
namespace {

// A caller that helps gets back to its own completions after this much, some 15 us.
constexpr uint64_t kHelpBytes = 128 << 10;
// Streaming needs blocks of four pages.
constexpr uint64_t kLeastStreamBytes = 16 << 10;
constexpr uint32_t kMostAutomaticThreads = 8;  // more add nothing: memory channels are the limit by then

uint32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return std::max(std::thread::hardware_concurrency(), 1u);
  return std::max(static_cast<uint32_t>(CPU_COUNT(&set)), 1u);
}

uint32_t thread_count(const Options& options) {
  return options.workers > 0 ? options.workers : std::clamp(usable_cores() - 1, 1u, kMostAutomaticThreads);
}

}  // namespace

CopyPool::CopyPool(const Options& options, Completions& completions)
    : options_(options),
      completions_(completions),
      most_threads_(thread_count(options)),
      limit_(options.workers > 0 ? options.workers + 1 : std::min(most_threads_ + 1, usable_cores())) {}

Status CopyPool::start() {
  std::lock_guard lock(mutex_);
  try {
    start_thread();
  } catch (const std::system_error& error) {
    return failed(MC_NO_MEMORY, std::string("cannot start a copy thread: ") + error.what());
  }
  return {};
}

void CopyPool::start_thread() {
  threads_.emplace_back([this] { work(); });
}

void CopyPool::stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void CopyPool::run(const std::shared_ptr<Job>& job) {
  std::lock_guard lock(mutex_);
  job->unfinished = job->moves.size();
  job->place = active_.insert(active_.end(), job);
  ready_.push_back(job);
  ready_count_.store(ready_.size(), std::memory_order_relaxed);
  // One piece is left to the caller, who is about to poll; where it does not, arm() sends it here.
  call_another();
}

// With the lock held: more work than the threads at hand will soon do deserves another one.
void CopyPool::call_another() {
  if (stopping_ || ready_.empty() || copying_.load(std::memory_order_relaxed) >= limit_) return;
  if (asleep_ > 0) {
    wake_.notify_one();
  } else if (threads_.size() < most_threads_) {
    try {
      start_thread();
    } catch (const std::system_error&) {
      // The threads there are do it all, only later.
    }
  }
}

void CopyPool::end_all(const Status& status) {
  std::vector<Completion> ended;
  {
    std::lock_guard lock(mutex_);
    for (auto next = active_.begin(); next != active_.end();) {
      std::shared_ptr<Job> job = *next++;  // before the end of its last operation takes it off the list
      fail_job(*job, status, ended);
    }
  }
  completions_.push(ended);
}

void CopyPool::end_cookie(uint64_t cookie, const Status& status) {
  std::vector<Completion> ended;
  {
    std::lock_guard lock(mutex_);
    for (auto next = active_.begin(); next != active_.end();) {
      std::shared_ptr<Job> job = *next++;  // before the end of its last operation takes it off the list
      for (size_t i = job->next; i < job->moves.size(); ++i) {
        if (job->moves[i].cookie == cookie) fail_move(*job, i, status, ended);
      }
    }
  }
  completions_.push(ended);
}

void CopyPool::end_connection(const Connection& connection, const Status& status) {
  std::vector<Completion> ended;
  {
    std::lock_guard lock(mutex_);
    for (auto next = active_.begin(); next != active_.end();) {
      std::shared_ptr<Job> job = *next++;
      if (job->connection.get() == &connection) fail_job(*job, status, ended);
    }
  }
  completions_.push(ended);
}

void CopyPool::work() {
  prepare_thread("mc-cxl-copy");
  std::unique_lock lock(mutex_);
  Piece piece;
  while (!stopping_) {
    if (copying_.load(std::memory_order_relaxed) >= limit_ || !claim(piece, options_.chunk_bytes)) {
      ++asleep_;
      wake_.wait(lock);
      --asleep_;
      continue;
    }
    call_another();
    lock.unlock();
    copy(piece);
    piece = {};
    lock.lock();
  }
}

void CopyPool::help() {
  Piece piece;
  {
    std::lock_guard lock(mutex_);
    if (stopping_ || copying_.load(std::memory_order_relaxed) >= limit_ || !claim(piece, kHelpBytes)) return;
  }
  copy(piece);
}

bool CopyPool::claim(Piece& piece, uint64_t most_bytes) {
  while (!ready_.empty()) {
    std::shared_ptr<Job> job = std::move(ready_.front());
    ready_.pop_front();
    claim_from(*job, piece, most_bytes);
    if (job->next < job->moves.size()) ready_.push_back(job);
    ready_count_.store(ready_.size(), std::memory_order_relaxed);
    if (piece.count == 0) continue;  // ended meanwhile
    copying_.fetch_add(1, std::memory_order_relaxed);
    piece.job = std::move(job);
    return true;
  }
  return false;
}

void CopyPool::claim_from(Job& job, Piece& piece, uint64_t most_bytes) {
  piece.count = 0;
  auto& moves = job.moves;
  while (job.next < moves.size() && moves[job.next].finished) ++job.next;
  if (job.next == moves.size()) return;
  piece.first = job.next;
  piece.offset = job.next_offset;
  Move& first = moves[job.next];
  if (uint64_t rest = first.length - job.next_offset; job.next_offset > 0 || rest > most_bytes) {
    piece.count = 1;
    piece.length = std::min(rest, most_bytes);
    ++first.pieces;
    job.next_offset += piece.length;
    if (job.next_offset < first.length) return;
    ++job.next;
    job.next_offset = 0;
    return;
  }
  uint64_t total = 0;
  while (job.next < moves.size() && !moves[job.next].finished &&
         moves[job.next].length <= most_bytes - total) {
    total += moves[job.next].length;
    ++moves[job.next].pieces;
    ++job.next;
    ++piece.count;
  }
  piece.length = first.length;
}

void CopyPool::copy(const Piece& piece) {
  Refusals refusals;
  Status status = copy_moves(piece, refusals);
  finish(piece, status, refusals);
}

Status CopyPool::copy_moves(const Piece& piece, Refusals& refusals) const {
  const Job& job = *piece.job;
  RemoteRegion& remote = *job.remote;
  uint32_t use = 0;
  if (Status status = remote.enter(&use); !status.ok()) return status;
  for (size_t i = 0; i < piece.count; ++i) {
    const Move& move = job.moves[piece.first + i];
    if (Status allowed = remote.check(move.opcode, move.remote_offset, move.length); !allowed.ok()) {
      refusals.emplace_back(i, std::move(allowed));
      continue;
    }
    uint64_t length = piece.count == 1 ? piece.length : move.length;
    bool stream = job.bytes >= options_.streaming_bytes && move.length >= kLeastStreamBytes;
    remote.copy(move.opcode, job.local->base + move.local_offset + piece.offset,
                move.remote_offset + piece.offset, length,
                stream ? Stores::kStreamingInTurns : Stores::kCached);
  }
  // The pool outlives its members: bytes from or for a dead one must not look like success.
  Status alive = remote.check_alive();
  remote.leave(use);
  return alive;
}

// `status` tells of all that were not refused.
void CopyPool::finish(const Piece& piece, const Status& status, const Refusals& refusals) {
  Job& job = *piece.job;
  std::vector<Completion> ended;
  ended.reserve(piece.count);
  auto refused = refusals.begin();
  {
    std::lock_guard lock(mutex_);
    copying_.fetch_sub(1, std::memory_order_relaxed);
    for (size_t i = 0; i < piece.count; ++i) {
      Move& move = job.moves[piece.first + i];
      assert(move.pieces > 0);
      --move.pieces;
      if (refused != refusals.end() && refused->first == i) {
        fail_move(job, piece.first + i, (refused++)->second, ended);
      } else if (!status.ok()) {
        fail_move(job, piece.first + i, status, ended);
      } else {
        move.moved += piece.count == 1 ? piece.length : move.length;
        close_move(job, piece.first + i, ended);
      }
    }
    if (asleep_ > 0 && !ready_.empty()) call_another();
  }
  completions_.push(ended);
}

void CopyPool::fail_job(Job& job, const Status& status, std::vector<Completion>& ended) {
  for (size_t i = job.next; i < job.moves.size(); ++i) fail_move(job, i, status, ended);
}

// Nothing more of the move is handed out. Where every byte was already, it ends with its own result.
void CopyPool::fail_move(Job& job, size_t index, const Status& status, std::vector<Completion>& ended) {
  Move& move = job.moves[index];
  if (move.finished) return;
  job.failures.emplace(index, status);
  if (index == job.next && job.next_offset > 0) {
    ++job.next;
    job.next_offset = 0;
  }
  if (move.pieces > 0) return;
  move.finished = true;
  Completion completion{move.cookie, move.moved, move.opcode, MC_OK, nullptr};
  completion.fail(job.failures.at(index));
  ended.push_back(std::move(completion));
  if (--job.unfinished == 0) active_.erase(job.place);
}

void CopyPool::close_move(Job& job, size_t index, std::vector<Completion>& ended) {
  Move& move = job.moves[index];
  if (auto failure = job.failures.find(index); failure != job.failures.end())
    return fail_move(job, index, failure->second, ended);
  if (move.finished || move.pieces > 0 || move.moved < move.length) return;
  move.finished = true;
  ended.push_back({move.cookie, move.moved, move.opcode, MC_OK, nullptr});
  if (--job.unfinished == 0) active_.erase(job.place);
}

}  // namespace mooncake::cxl
