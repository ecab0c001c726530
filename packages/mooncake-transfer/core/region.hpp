// Memory of this process, as the engine's drivers know it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "endpoint.hpp"
#include "interrupt.hpp"

namespace mooncake {

using Endpoints = std::vector<std::unique_ptr<Endpoint>>;

// What a driver says of itself or of a region, on its way to or from a peer.
struct DriverBlob {
  std::string driver;
  std::string device;
  std::string blob;
};

// A registered range of local memory. Handles are per endpoint, 0 where the driver did not take it.
struct Region : std::enable_shared_from_this<Region> {
  explicit Region(size_t endpoints) : handles(endpoints) {}

  uint64_t id = 0;
  uint64_t address = 0;  // 0 for files and block devices
  uint64_t length = 0;
  int numa_node = -1;
  std::string name;
  std::vector<std::atomic<mc_handle>> handles;
  std::timed_mutex closer;  // held by the one thread that gives the handles back

  // Transfers hold the region while they run; closing waits for them.
  bool enter() {
    if (users_.fetch_add(1, std::memory_order_acq_rel) & kClosing) {
      leave();
      return false;
    }
    return true;
  }
  void leave() {
    // The lock orders this after a closing thread's look at the count.
    if (users_.fetch_sub(1, std::memory_order_acq_rel) - 1 == kClosing) {
      std::lock_guard lock(mutex_);
      idle_.notify_all();
    }
  }
  uint64_t users() const { return users_.load(std::memory_order_acquire) & ~kClosing; }
  // False, and nothing changes, when transfers use it and it shall be refused then.
  bool begin_close(bool refuse_when_used) {
    uint64_t idle = 0;
    if (!refuse_when_used) {
      users_.fetch_or(kClosing, std::memory_order_acq_rel);
      return true;
    }
    return users_.compare_exchange_strong(idle, kClosing) || (idle & kClosing);
  }
  bool wait_idle(uint64_t deadline_ns) {
    std::unique_lock lock(mutex_);
    return wait_until(idle_, lock, deadline_ns, [&] { return users() == 0; });
  }

 private:
  static constexpr uint64_t kClosing = uint64_t{1} << 63;
  std::atomic<uint64_t> users_{0};
  std::mutex mutex_;
  std::condition_variable idle_;
};

}  // namespace mooncake
