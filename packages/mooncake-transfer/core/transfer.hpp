// A batch of reads or writes in flight.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "region.hpp"

namespace mooncake {

class Transfer;

// What the engine remembers of one operation; its address is the operation's cookie.
struct OpState {
  Transfer* owner = nullptr;
  uint32_t index = 0;
  uint32_t rail = 0;   // index into the remote region's rails
  uint32_t tried = 0;  // bit per rail
};

class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  Transfer(std::shared_ptr<Region> local, std::shared_ptr<RemoteRegion> remote, size_t endpoints)
      : local(std::move(local)), remote(std::move(remote)), bytes_by_endpoint(endpoints) {}
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  // Waits until the deadline; false when the transfer is still running then.
  bool wait_until(uint64_t deadline_ns);
  bool done() const { return done_.load(std::memory_order_acquire); }
  Status result() const;
  double seconds() const;
  // Makes the eventfd `fd` readable once the transfer is done. The descriptor is duplicated.
  Status signal_when_done(int fd);

  // For the engine.
  void note_failure(const Status& status);  // the first one is the result
  void note_attempt(const std::string& reason);
  std::string attempts() const;
  bool finish_ops(uint64_t count);  // true when these were the last ones
  void complete();

  std::shared_ptr<Region> local;
  std::shared_ptr<RemoteRegion> remote;
  std::vector<mc_op> ops;
  std::vector<OpState> states;
  std::vector<std::atomic<uint64_t>> bytes_by_endpoint;
  uint64_t total_bytes = 0;
  std::atomic<uint64_t> bytes_done{0};
  std::atomic<bool> cancelled{false};

 private:
  std::atomic<uint64_t> remaining_{0};
  std::atomic<bool> done_{false};
  uint64_t started_ns_ = now_ns();
  uint64_t finished_ns_ = 0;
  mutable std::mutex mutex_;
  std::condition_variable finished_;
  Status result_;
  std::vector<std::string> attempts_;
  std::vector<int> signals_;

  friend class Engine;
};

}  // namespace mooncake
