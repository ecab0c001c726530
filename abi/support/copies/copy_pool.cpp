#include "copy_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <cassert>
#include <system_error>
#include <utility>

#include "../os.hpp"

namespace mooncake::driver {
namespace {

// A caller that helps gets back to its own completions after this much, 10 to 50 us.
constexpr uint64_t kHelpBytes = 512 << 10;
// Streaming needs blocks of four pages.
constexpr uint64_t kLeastStreamBytes = 16 << 10;
// Pieces get smaller towards the end, so that all threads are done at about the same time.
constexpr uint64_t kLeastPieceBytes = 32 << 10;
constexpr uint64_t kPieceUnit = 16 << 10;
// How long a thread without work looks out for more before it sleeps: to be woken takes some 30 us.
constexpr uint64_t kLookOutNs = 50'000;
// Between two looks: somebody else needs the core.
constexpr uint64_t kLostCoreNs = 200'000;
constexpr uint64_t kNoLookOutNs = 5'000'000;
// As long as two pieces, and as it takes to be woken.
constexpr uint64_t kLastPiecesNs = 30'000;
constexpr uint32_t kMostAutomaticThreads = 8;  // more add nothing: memory channels are the limit by then

uint32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return std::max(std::thread::hardware_concurrency(), 1u);
  return std::max(static_cast<uint32_t>(CPU_COUNT(&set)), 1u);
}

uint32_t thread_count(const CopyPoolOptions& options) {
  return options.workers > 0 ? options.workers : std::clamp(usable_cores() - 1, 1u, kMostAutomaticThreads);
}

}  // namespace

Stores CopyJob::stores_for(const Move& move) const {
  return move.length >= kLeastStreamBytes ? stores.stores : Stores::kCached;
}

CopyPool::CopyPool(const CopyPoolOptions& options, Completions& completions)
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
  // The caller copies from the front.
  End from = threads_.size() % 2 == 0 ? End::kBack : End::kFront;
  threads_.emplace_back([this, from] { work(from); });
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

void CopyPool::add(const std::shared_ptr<Job>& job) {
  std::lock_guard lock(mutex_);
  job->unfinished = job->moves.size();
  job->end = job->moves.size();
  job->place = active_.insert(active_.end(), job);
}

void CopyPool::run(const std::shared_ptr<Job>& job) {
  std::vector<Completion> ended;
  {
    auto lock = lock_soon(mutex_);
    for (size_t i = 0; i < job->moves.size(); ++i) {
      const Move& move = job->moves[i];
      Status allowed = job->check(move);
      if (!allowed.ok() && !move.finished) fail_move(*job, i, allowed, ended);
    }
    if (job->unfinished > 0) {
      bool tune = job->has_stores() && job->bytes >= options_.streaming_bytes &&
                  job->bytes / job->moves.size() >= kLeastStreamBytes;
      if (tune) job->stores = tuner_.choose(job->bytes);
      ready_.push_back(job);
      ready_count_.store(ready_.size(), std::memory_order_relaxed);
      // One piece is left to the caller, who is about to poll; where it does not, arm() sends it here.
      call_another();
    }
  }
  completions_.push(ended);
}

// With the lock held: more work than the threads at hand will soon do deserves another one.
void CopyPool::call_another() {
  if (stopping_ || ready_.empty() || copying_.load(std::memory_order_relaxed) >= limit_) return;
  if (looking_) return;
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

void CopyPool::end(const std::shared_ptr<Job>& job, const Status& status) {
  std::vector<Completion> ended;
  {
    auto lock = lock_soon(mutex_);
    fail_job(*job, status, ended);
  }
  completions_.push(ended);
}

void CopyPool::end_all(const Status& status) {
  std::vector<Completion> ended;
  {
    auto lock = lock_soon(mutex_);
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
    auto lock = lock_soon(mutex_);
    for (auto next = active_.begin(); next != active_.end();) {
      std::shared_ptr<Job> job = *next++;  // before the end of its last operation takes it off the list
      for (size_t i = job->next, end = job->end; i < end; ++i) {
        if (job->moves[i].cookie == cookie) fail_move(*job, i, status, ended);
      }
    }
  }
  completions_.push(ended);
}

void CopyPool::end_connection(const void* connection, const Status& status) {
  std::vector<Completion> ended;
  {
    auto lock = lock_soon(mutex_);
    for (auto next = active_.begin(); next != active_.end();) {
      std::shared_ptr<Job> job = *next++;
      if (job->is_of(connection)) fail_job(*job, status, ended);
    }
  }
  completions_.push(ended);
}

void CopyPool::work(End from) {
  prepare_thread(options_.thread_name);
  std::unique_lock lock(mutex_);
  Piece piece;
  bool busy = false;  // since it last looked out
  uint64_t look_not_before_ns = 0;
  while (!stopping_) {
    if (copying_.load(std::memory_order_relaxed) >= limit_ || !claim(piece, options_.chunk_bytes, from)) {
      if (std::exchange(busy, false)) {
        look_out(lock, look_not_before_ns);
        continue;
      }
      ++asleep_;
      wake_.wait(lock);
      --asleep_;
      continue;
    }
    busy = true;
    call_another();
    lock.unlock();
    copy(piece);
    piece = {};
    lock = lock_soon(mutex_);
  }
}

// Transfers come in bursts: the next one is often posted a few microseconds after the last byte.
void CopyPool::look_out(std::unique_lock<std::mutex>& lock, uint64_t& not_before_ns) {
  uint64_t now = now_ns();
  if (looking_ || now < not_before_ns) return;
  looking_ = true;
  lock.unlock();
  for (uint64_t until = now + kLookOutNs; now < until && !wants_help();) {
    relax();
    uint64_t before = std::exchange(now, now_ns());
    if (now - before > kLostCoreNs) not_before_ns = now + kNoLookOutNs;
  }
  lock = lock_soon(mutex_);
  looking_ = false;
}

size_t CopyPool::poll(mc_completion* completions, size_t capacity) {
  size_t count = completions_.poll(completions, capacity);
  if (count > 0 || !wants_help()) return count;
  help();
  return completions_.poll(completions, capacity);
}

bool CopyPool::arm() {
  // The last pieces are over sooner than a thread that sleeps is awake again.
  for (uint64_t until = now_ns() + kLastPiecesNs; finishing() && !completions_.any() && now_ns() < until;)
    relax();
  return !wants_help() && completions_.arm();
}

void CopyPool::help() {
  Piece piece;
  {
    auto lock = lock_soon(mutex_);
    if (stopping_ || copying_.load(std::memory_order_relaxed) >= limit_ ||
        !claim(piece, kHelpBytes, End::kFront))
      return;
  }
  copy(piece);
}

bool CopyPool::claim(Piece& piece, uint64_t most_bytes, End from) {
  while (!ready_.empty()) {
    std::shared_ptr<Job> job = std::move(ready_.front());
    ready_.pop_front();
    claim_from(*job, piece, most_bytes, from);
    if (!job->exhausted()) ready_.push_back(job);
    ready_count_.store(ready_.size(), std::memory_order_relaxed);
    if (piece.count == 0) continue;  // ended meanwhile
    copying_.fetch_add(1, std::memory_order_relaxed);
    piece.job = std::move(job);
    return true;
  }
  return false;
}

void CopyPool::claim_from(Job& job, Piece& piece, uint64_t most_bytes, End from) {
  piece.count = 0;
  auto& moves = job.moves;
  auto at = [&] { return from == End::kFront ? job.next : job.end - 1; };
  while (!job.exhausted() && moves[at()].finished) job.drop(from);
  if (job.exhausted()) return;
  uint64_t rest = job.bytes > job.handed_out ? job.bytes - job.handed_out : 0;
  most_bytes =
      std::min(most_bytes, std::max(rest / (2 * limit_) / kPieceUnit * kPieceUnit, kLeastPieceBytes));
  piece.first = at();
  uint64_t left = job.left_of(piece.first);
  if (left < moves[piece.first].length || left > most_bytes) {
    piece.count = 1;
    piece.length = std::min(left, most_bytes);
    uint64_t start = piece.first == job.next ? job.next_offset : 0;
    piece.offset = from == End::kFront ? start : start + left - piece.length;
    (from == End::kFront ? job.next_offset : job.end_cut) += piece.length;
    job.handed_out += piece.length;
    ++moves[piece.first].pieces;
    if (piece.length == left) job.drop(from);
    return;
  }
  uint64_t total = 0;
  while (!job.exhausted()) {
    Move& move = moves[at()];
    if (move.finished || job.left_of(at()) < move.length || move.length > most_bytes - total) break;
    piece.first = std::min(piece.first, at());
    total += move.length;
    ++move.pieces;
    ++piece.count;
    job.drop(from);
  }
  job.handed_out += total;
  piece.offset = 0;
  piece.length = moves[piece.first].length;
}

void CopyPool::copy(const Piece& piece) {
  size_t good = 0;
  uint64_t started = now_ns();
  Status status = piece.job->copy(piece, good);
  finish(piece, good, status, now_ns() - started);
}

void CopyPool::finish(const Piece& piece, size_t good, const Status& status, uint64_t ns) {
  Job& job = *piece.job;
  std::vector<Completion> ended;
  ended.reserve(piece.count);
  {
    auto lock = lock_soon(mutex_);
    copying_.fetch_sub(1, std::memory_order_relaxed);
    for (size_t i = 0; i < piece.count; ++i) {
      Move& move = job.moves[piece.first + i];
      assert(move.pieces > 0);
      --move.pieces;
      if (i < good) {
        uint64_t bytes = piece.bytes_of(move);
        move.moved += bytes;
        job.copied += bytes;
        close_move(job, piece.first + i, ended);
      } else {
        fail_move(job, piece.first + i, status, ended);
      }
    }
    job.copying_ns += ns;
    if (job.unfinished == 0 && job.failures.empty()) tuner_.note(job.stores, job.copied, job.copying_ns);
    if (asleep_ > 0 && !ready_.empty()) call_another();
  }
  completions_.push(ended);
}

void CopyPool::fail_job(Job& job, const Status& status, std::vector<Completion>& ended) {
  for (size_t i = job.next, end = job.end; i < end; ++i) fail_move(job, i, status, ended);
}

// Nothing more of the move is handed out. Where every byte was already, it ends with its own result.
void CopyPool::fail_move(Job& job, size_t index, const Status& status, std::vector<Completion>& ended) {
  Move& move = job.moves[index];
  if (move.finished) return;
  job.failures.emplace(index, status);
  if (index == job.next && job.next_offset > 0) job.drop(End::kFront);
  if (index + 1 == job.end && job.end_cut > 0) job.drop(End::kBack);
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

}  // namespace mooncake::driver
