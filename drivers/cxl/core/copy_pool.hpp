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
#include <utility>
#include <vector>

#include "mooncake_driver.h"
#include "options.hpp"
#include "region.hpp"
#include "remote.hpp"
#include "support/completions.hpp"

namespace mooncake::cxl {

using driver::Completion;
using driver::Completions;

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

// What one submit() asked for between the same two regions. Copied in pieces: parts of long operations, runs
// of short ones.
struct Job {
  std::shared_ptr<Connection> connection;
  std::shared_ptr<Region> local;
  std::shared_ptr<RemoteRegion> remote;
  std::vector<Move> moves;
  uint64_t bytes = 0;

  // Guarded by the pool's mutex.
  size_t next = 0;           // the first move that is not wholly handed out
  uint64_t next_offset = 0;  // how much of it is
  size_t unfinished = 0;
  std::map<size_t, Status> failures;
  std::list<std::shared_ptr<Job>>::iterator place;
};

// Each operation of a job completes exactly once: when its bytes are moved, or by end(). Thread-safe.
class CopyPool {
 public:
  CopyPool(const Options& options, Completions& completions);
  ~CopyPool() { stop(); }

  Status start();
  // Joins the threads. Operations that are neither ended nor finished never complete.
  void stop();

  void run(const std::shared_ptr<Job>& job);
  // Ends operations early: those at rest at once, those being copied when the pieces at hand are done.
  void end_all(const Status& status);
  void end_cookie(uint64_t cookie, const Status& status);
  void end_connection(const Connection& connection, const Status& status);

  // Whether a caller that has time should help(): work waits, and fewer threads copy than there are cores.
  bool wants_help() const {
    return ready_count_.load(std::memory_order_relaxed) > 0 &&
           copying_.load(std::memory_order_relaxed) < limit_;
  }
  // Copies one piece of at most kHelpBytes, if there is any.
  void help();

 private:
  // Moves [first, first + count) of a job, or `length` bytes from `offset` of a single one.
  struct Piece {
    std::shared_ptr<Job> job;
    size_t first = 0;
    size_t count = 0;
    uint64_t offset = 0;
    uint64_t length = 0;
  };

  void work();
  void start_thread();
  void call_another();
  bool claim(Piece& piece, uint64_t most_bytes);
  void claim_from(Job& job, Piece& piece, uint64_t most_bytes);
  void copy(const Piece& piece);
  using Refusals = std::vector<std::pair<size_t, Status>>;  // by place in the piece, in order
  Status copy_moves(const Piece& piece, Refusals& refusals) const;
  void finish(const Piece& piece, const Status& status, const Refusals& refusals);
  // With the lock held.
  void fail_move(Job& job, size_t index, const Status& status, std::vector<Completion>& ended);
  void close_move(Job& job, size_t index, std::vector<Completion>& ended);
  void fail_job(Job& job, const Status& status, std::vector<Completion>& ended);

  const Options& options_;
  Completions& completions_;
  const uint32_t most_threads_;
  const uint32_t limit_;  // threads that copy at the same time, callers included

  std::atomic<size_t> ready_count_{0};  // size of ready_
  std::atomic<uint32_t> copying_{0};    // both change under the lock only

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
  uint32_t asleep_ = 0;
  bool stopping_ = false;
  std::list<std::shared_ptr<Job>> active_;
  // Jobs with work to hand out. Each has its turn, a piece at a time, so that none waits for all of another.
  std::deque<std::shared_ptr<Job>> ready_;
};

}  // namespace mooncake::cxl
