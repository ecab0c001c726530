// A leadership of a cluster, as long as it lasts, and the clock by which it does.
#pragma once

#include <atomic>
#include <ctime>

namespace mooncake::store {

// CLOCK_BOOTTIME: it goes on while a machine sleeps, as the leases of others do.
inline double lease_clock_s() {
  timespec ts{};
  clock_gettime(CLOCK_BOOTTIME, &ts);
  return static_cast<double>(ts.tv_sec) + static_cast<double>(ts.tv_nsec) * 1e-9;
}

// Until when nobody else can lead, as the candidate has last heard. For any thread.
class Tenure {
 public:
  void last(double until_s) { until_s_.store(until_s, std::memory_order_relaxed); }
  bool held() const { return lease_clock_s() < until_s_.load(std::memory_order_relaxed); }

 private:
  std::atomic<double> until_s_{0};
};

}  // namespace mooncake::store
