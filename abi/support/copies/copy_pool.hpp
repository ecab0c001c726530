// Operations that submit() did not finish itself, and the threads that copy for them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "../completions.hpp"
#include "../copy.hpp"
#include "../status.hpp"
#include "mooncake_driver.h"
#include "store_tuner.hpp"

namespace mooncake::driver {

// One operation of a job. The first part never changes; the rest is guarded by the pool's mutex.
struct Move {
  mc_opcode opcode;
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
  uint64_t cookie;

  uint64_t moved = 0;
  uint32_t pieces = 0;  // being copied
  bool finished = false;
};

class CopyJob;

// Moves [first, first + count) of a job, or `length` bytes from `offset` of a single one.
struct Piece {
  std::shared_ptr<CopyJob> job;
  size_t first = 0;
  size_t count = 0;
  uint64_t offset = 0;
  uint64_t length = 0;

  uint64_t bytes_of(const Move& move) const { return count == 1 ? length : move.length; }
};

// What one submit() asked for between the same two regions. Copied in pieces: parts of long operations, runs
// of short ones. Threads take them from both ends: each then has the same part of a batch that comes again in
// its own cache, and two that stay far apart do not get into each other's way in the memory's banks (64 MiB
// past the caches with two cores: 43 GB/s, with neighbouring pieces 37). A driver derives its own.
class CopyJob {
 public:
  virtual ~CopyJob() = default;

  // Whether an operation may be tried at all. Called by run().
  virtual Status check(const Move& move) const = 0;
  // Whether it is copied with instructions of ours, whose kind makes a difference.
  virtual bool has_stores() const { return true; }
  virtual bool is_of(const void* connection) const = 0;
  // Copies; `good` are the first so many moves of the piece that are done, and did not come from or go to the
  // memory of the dead. On any thread.
  virtual Status copy(const Piece& piece, size_t& good) const = 0;

  void add(const mc_op& op) {
    moves.push_back(
        {static_cast<mc_opcode>(op.opcode), op.local_offset, op.remote_offset, op.length, op.cookie});
    bytes += op.length;
  }

  std::vector<Move> moves;

 protected:
  Stores stores_for(const Move& move) const;

 private:
  friend class CopyPool;
  enum class End { kFront, kBack };

  bool exhausted() const { return next == end; }
  // How much of a move, one of [next, end), is not handed out.
  uint64_t left_of(size_t index) const {
    return moves[index].length - (index == next ? next_offset : 0) - (index + 1 == end ? end_cut : 0);
  }
  // Nothing more of the first or last move is handed out. Not exhausted.
  void drop(End from) {
    from == End::kFront ? void(++next) : void(--end);
    if (from == End::kFront || exhausted()) next_offset = 0;
    if (from == End::kBack || exhausted()) end_cut = 0;
  }

  uint64_t bytes = 0;
  StoreTuner::Choice stores;  // constant from run() on

  // Guarded by the pool's mutex.
  uint64_t handed_out = 0;  // bytes
  uint64_t copied = 0;      // bytes, and the time of all threads
  uint64_t copying_ns = 0;
  size_t next = 0;           // the first move that is not wholly handed out
  uint64_t next_offset = 0;  // how much of it is, from its beginning
  size_t end = 0;            // one behind the last such move
  uint64_t end_cut = 0;      // how much of that is, from its end
  size_t unfinished = 0;
  std::map<size_t, Status> failures;
  std::list<std::shared_ptr<CopyJob>>::iterator place;
};

struct CopyPoolOptions {
  const char* thread_name;
  uint32_t workers;          // 0: as many as there are cores for
  uint64_t streaming_bytes;  // from here on the stores are tuned
  uint64_t chunk_bytes;      // the longest piece
};

// Each operation of a job added completes exactly once: when its bytes are moved, or by end(). Thread-safe.
class CopyPool {
 public:
  CopyPool(const CopyPoolOptions& options, Completions& completions);
  ~CopyPool() { stop(); }

  Status start();
  // Joins the threads. Every operation must have been ended or finished, or its completion is lost.
  void stop();

  void add(const std::shared_ptr<CopyJob>& job);
  // Copies an added job, once.
  void run(const std::shared_ptr<CopyJob>& job);
  // Ends operations early: those at rest at once, those being copied when the pieces at hand are done.
  void end(const std::shared_ptr<CopyJob>& job, const Status& status);
  void end_all(const Status& status);
  void end_cookie(uint64_t cookie, const Status& status);
  void end_connection(const void* connection, const Status& status);

  // poll() and arm() of the driver. When nothing has finished, the caller's time is used to copy a piece.
  size_t poll(mc_completion* completions, size_t capacity);
  bool arm();

  // For what is copied without a job: the tuner finds out about it too.
  template <class Copy>
  Status tuned(uint64_t bytes, Copy&& copy) {
    StoreTuner::Choice choice = tuner_.choose(bytes);
    uint64_t started = now_ns();
    Status status = copy(choice.stores);
    if (status.ok()) tuner_.note(choice, bytes, now_ns() - started);
    return status;
  }

 private:
  using End = CopyJob::End;
  using Job = CopyJob;

  void work(End from);
  void look_out(std::unique_lock<std::mutex>& lock, uint64_t& not_before_ns);
  void start_thread();
  void call_another();
  bool claim(Piece& piece, uint64_t most_bytes, End from);
  void claim_from(Job& job, Piece& piece, uint64_t most_bytes, End from);
  void copy(const Piece& piece);
  // Whether a caller that has time should help(): work waits, and fewer threads copy than there are cores.
  bool wants_help() const {
    return ready_count_.load(std::memory_order_relaxed) > 0 &&
           copying_.load(std::memory_order_relaxed) < limit_;
  }
  // Copies one piece of at most kHelpBytes, if there is any.
  void help();
  // Whether all is handed out and the last pieces are being copied.
  bool finishing() const {
    return copying_.load(std::memory_order_relaxed) > 0 && ready_count_.load(std::memory_order_relaxed) == 0;
  }
  void finish(const Piece& piece, size_t good, const Status& status, uint64_t ns);
  // With the lock held.
  void fail_move(Job& job, size_t index, const Status& status, std::vector<Completion>& ended);
  void close_move(Job& job, size_t index, std::vector<Completion>& ended);
  void fail_job(Job& job, const Status& status, std::vector<Completion>& ended);

  const CopyPoolOptions options_;
  Completions& completions_;
  StoreTuner tuner_;
  const uint32_t most_threads_;
  const uint32_t limit_;  // threads that copy at the same time, callers included

  std::atomic<size_t> ready_count_{0};  // size of ready_
  std::atomic<uint32_t> copying_{0};    // both change under the lock only

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
  uint32_t asleep_ = 0;
  bool looking_ = false;  // one thread is awake and looks out for work
  bool stopping_ = false;
  std::list<std::shared_ptr<Job>> active_;
  // Jobs with work to hand out. Each has its turn, a piece at a time, so that none waits for all of another.
  std::deque<std::shared_ptr<Job>> ready_;
};

}  // namespace mooncake::driver
