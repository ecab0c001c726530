// The side that starts operations: one socket and one thread for each peer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>

#include "regions.hpp"
#include "support/completions.hpp"
#include "support/os.hpp"
#include "target.hpp"

namespace template_driver {

using mooncake::driver::Completions;
using mooncake::driver::UniqueFd;

// Tells the engine how an operation ended, which must not use its local memory any more.
void push(Completions& completions, const mc_op& op, const Status& status);

struct Operation {
  mc_op op{};
  Request request{};
  Regions::Use local;
};

// Thread-safe. Every operation submitted completes exactly once.
class Connection {
 public:
  Connection(const Address& peer, uint64_t session, double timeout_s, Completions& completions);
  ~Connection();

  void submit(Operation operation);
  void cancel(uint64_t cookie);

  // What the target knows this connection by, whatever socket it uses.
  uint64_t session() const { return session_; }
  // Whether bytes of a write that ended may reach the target's memory yet.
  bool has_late_writes() const { return late_; }

 private:
  void work();
  Status run(const Operation& operation);
  Status dial();

  const Address peer_;
  const uint64_t session_;
  std::atomic<bool> late_{false};
  const double timeout_s_;
  Completions& completions_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Operation> queue_;
  bool closing_ = false;
  UniqueFd socket_;       // changed by the thread only, with the lock held; others may shut it down
  uint64_t running_ = 0;  // the cookie of the operation under way, if `busy_`
  bool busy_ = false;
  bool interrupted_ = false;  // that operation has been cancelled
  std::thread thread_;
};

}  // namespace template_driver
