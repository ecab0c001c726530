// One way to a peer: a local endpoint paired with one of the peer's endpoints of the same driver.
#pragma once

#include <array>
#include <atomic>
#include <deque>
#include <mutex>
#include <string>

#include "endpoint.hpp"

namespace mooncake {

// How rails are chosen and when they are given up. Set once, before the engine starts.
struct RailPolicy {
  uint32_t breaker_errors = 3;  // incidents within `breaker_window_ns`, successes between or not
  uint64_t breaker_window_ns = 10'000'000'000;
  uint64_t breaker_pause_ns = 30'000'000'000;       // doubles with each opening that follows another ...
  uint64_t breaker_max_pause_ns = 300'000'000'000;  // ... up to this
  uint64_t suspect_pause_ns = 100'000'000;          // after a single incident others are preferred so long
  double slow_ratio = 4.0;          // a rail so many times slower than the best one is only probed
  uint32_t probe_every = 100;       // one slice in so many goes to the next rail in turn, whatever its score
  uint64_t slice_bytes = 1u << 20;  // how a transfer is cut when several rails share it
  uint32_t attempts = 2;            // rounds through all rails that one slice gets
  uint64_t aging_ns = 50'000'000;   // waiting so long is worth one priority class
};

class Rail {
 public:
  static constexpr size_t kLatencyBuckets = 24;  // bucket i counts slices of less than 2^i microseconds

  // `tier`: rails of a lower tier are used before any of a higher one.
  Rail(const Endpoint& endpoint, size_t endpoint_index, std::string remote_device, std::string address,
       uint32_t tier, bool spare);

  const size_t endpoint;
  const uint32_t tier;
  const bool spare;  // connected when others have failed
  const std::string remote_device;
  const std::string address;  // the driver's blob for connect()
  std::string label;          // for messages: driver, local and remote device

  // ---- what is in flight
  bool room(uint64_t bytes) const {
    uint64_t now = in_flight_bytes_.load(std::memory_order_relaxed);
    return now == 0 ||
           (now + bytes <= max_bytes_ && in_flight_ops_.load(std::memory_order_relaxed) < max_ops_);
  }
  uint64_t max_bytes() const { return max_bytes_; }
  uint64_t in_flight_bytes() const { return in_flight_bytes_.load(std::memory_order_relaxed); }
  // Returns what is queued on the rail with the new slice, the base of the next bandwidth sample.
  uint64_t begin(uint64_t bytes) {
    in_flight_ops_.fetch_add(1, std::memory_order_relaxed);
    return in_flight_bytes_.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  }
  void end(uint64_t bytes) {
    in_flight_ops_.fetch_sub(1, std::memory_order_relaxed);
    in_flight_bytes_.fetch_sub(bytes, std::memory_order_relaxed);
  }

  // ---- what it has shown
  double bandwidth() const { return bandwidth_.load(std::memory_order_relaxed); }
  // When a slice of so many bytes would be done, in seconds from now, without the NUMA penalty.
  double predict(uint64_t bytes) const {
    return static_cast<double>(in_flight_bytes() + bytes) / bandwidth();
  }
  // `queued`: what begin() returned. True when this success ended a pause or a suspicion.
  bool succeeded(uint64_t bytes, uint64_t queued, uint64_t elapsed_ns);
  // One incident counts once, however many slices it takes along: those submitted before the last incident
  // do not count again. True when the breaker opened.
  bool failed(uint64_t submitted_ns, const std::string& reason, const RailPolicy& policy);
  // It may not work, so others are preferred for a while.
  void suspect(const RailPolicy& policy);
  void retried() { retries.fetch_add(1, std::memory_order_relaxed); }

  uint64_t paused_until_ns() const { return paused_until_ns_.load(std::memory_order_relaxed); }
  bool open() const { return open_.load(std::memory_order_relaxed); }  // the breaker is (or was last) open
  // Its pause is over, and what is under way will tell whether it works again.
  bool on_trial() const { return open() && in_flight_ops_.load(std::memory_order_relaxed) != 0; }
  std::string last_error() const;
  // Whether this reason is news: the same one is told once.
  bool tell(const std::string& reason);

  std::atomic<uint64_t> bytes{0}, ops{0}, errors{0}, retries{0};
  std::array<std::atomic<uint64_t>, kLatencyBuckets> latency{};

 private:
  const uint64_t max_bytes_;
  const uint64_t max_ops_;
  const double expected_;  // bytes per second, as the driver declares
  std::atomic<uint64_t> in_flight_bytes_{0}, in_flight_ops_{0};
  std::atomic<double> bandwidth_;
  std::atomic<uint64_t> paused_until_ns_{0};
  std::atomic<bool> open_{false};
  std::atomic<bool> troubled_{false};  // there is something for succeeded() to clear

  mutable std::mutex mutex_;  // what follows
  uint64_t last_incident_ns_ = 0;
  std::deque<uint64_t> incidents_;  // when they were, since the breaker opened last
  uint64_t next_pause_ns_ = 0;
  std::string last_error_;
  std::string told_;
};

}  // namespace mooncake
