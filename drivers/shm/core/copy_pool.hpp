// Operations that submit() did not finish itself, and the threads that copy for them.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "access.hpp"
#include "completions.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "region.hpp"

namespace mooncake::shm {

struct Connection;
struct RemoteRegion;

// One operation. The first part never changes; the rest belongs to the pool.
struct Operation {
  mc_opcode opcode;
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
  uint64_t cookie;
  std::shared_ptr<Connection> connection;
  std::shared_ptr<Region> local;
  std::shared_ptr<RemoteRegion> remote;

  std::shared_ptr<const Access> access;
  uint64_t claimed = 0;  // bytes handed to workers; `length` also when no more shall be
  uint64_t moved = 0;
  uint32_t pieces_running = 0;
  bool finished = false;
  Status failure;
  std::multimap<uint64_t, std::shared_ptr<Operation>>::iterator place;
};

// Each operation added completes exactly once: when its bytes are moved, or by end(). Thread-safe.
class CopyPool {
 public:
  CopyPool(const Options& options, Completions& completions) : options_(options), completions_(completions) {}
  ~CopyPool() { stop(); }

  Status start();
  // Joins the workers. Every operation must have been ended or finished, or its completion is lost.
  void stop();

  void add(const std::shared_ptr<Operation>& operation);
  // Copies an added operation whose access has been granted.
  void run(const std::shared_ptr<Operation>& operation, std::shared_ptr<const Access> access);
  // Ends operations early: those at rest at once, those being copied at the end of the piece (`chunk_bytes`)
  // at hand.
  void end(const std::shared_ptr<Operation>& operation, const Status& status);
  void end_cookie(uint64_t cookie, const Status& status);
  void end_connection(const Connection& connection, const Status& status);

 private:
  struct Piece {
    std::shared_ptr<Operation> operation;
    uint64_t offset;
    uint64_t length;
  };

  void work();
  bool next_piece(std::unique_lock<std::mutex>& lock, Piece& piece);
  std::deque<std::shared_ptr<Operation>>& next_queue();
  void finish_piece(const Piece& piece, Status status);
  // With the lock held: whether the operation ends now; if so it is taken off the books.
  bool close_if_done(Operation& operation);
  bool request_end(Operation& operation, const Status& status);
  void complete(Operation& operation);

  const Options& options_;
  Completions& completions_;
  std::vector<std::thread> threads_;

  std::mutex mutex_;
  std::condition_variable ready_;
  bool stopping_ = false;
  std::multimap<uint64_t, std::shared_ptr<Operation>> active_;  // by cookie; its iterators stay valid
  // Operations of one piece, and longer ones. While both wait, each has every other turn: small operations do
  // not stand in line behind gigabytes, and large ones always go on.
  std::deque<std::shared_ptr<Operation>> short_;
  std::deque<std::shared_ptr<Operation>> long_;
  bool long_is_next_ = false;
};

}  // namespace mooncake::shm
