#include "rail.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace mooncake {

namespace {

constexpr uint64_t kDefaultBytes = 64u << 20;
constexpr uint64_t kDefaultOps = 4096;
constexpr double kUnknownBandwidth = 1e9;
constexpr uint64_t kSampleBytes = 64u << 10;  // smaller slices measure latency, not bandwidth
constexpr double kWeight = 0.1;               // of a new sample in the moving average
constexpr double kRange = 100;                // how far samples may lead away from what the driver declares

std::string rail_label(const Endpoint& endpoint, const std::string& remote_device) {
  if (endpoint.device().empty() && remote_device.empty()) return endpoint.name();
  return endpoint.name() + " " + endpoint.device() + " -> " + remote_device;
}

uint64_t or_default(uint64_t value, uint64_t fallback) { return value == 0 ? fallback : value; }

double declared(const mc_caps& caps) {
  return caps.bandwidth_bytes_per_s == 0 ? kUnknownBandwidth
                                         : static_cast<double>(caps.bandwidth_bytes_per_s);
}

}  // namespace

Rail::Rail(const Endpoint& local, size_t endpoint_index, std::string device, std::string blob, uint32_t tier,
           bool spare)
    : endpoint(endpoint_index),
      tier(tier),
      spare(spare),
      remote_device(std::move(device)),
      address(std::move(blob)),
      label(rail_label(local, remote_device)),
      max_bytes_(or_default(local.caps().in_flight_bytes, kDefaultBytes)),
      max_ops_(or_default(local.caps().in_flight_ops, kDefaultOps)),
      expected_(declared(local.caps())),
      bandwidth_(expected_) {}

bool Rail::succeeded(uint64_t moved, uint64_t queued, uint64_t elapsed_ns) {
  bytes.fetch_add(moved, std::memory_order_relaxed);
  ops.fetch_add(1, std::memory_order_relaxed);
  size_t bucket = std::bit_width(elapsed_ns / 1000);
  latency[std::min(bucket, kLatencyBuckets - 1)].fetch_add(1, std::memory_order_relaxed);
  if (moved >= kSampleBytes && elapsed_ns != 0) {
    // The slice waited for what was queued before it: all of that moved in the time.
    double sample = static_cast<double>(queued) / (static_cast<double>(elapsed_ns) * 1e-9);
    double mean = bandwidth_.load(std::memory_order_relaxed);
    mean += kWeight * (std::clamp(sample, expected_ / kRange, expected_ * kRange) - mean);
    bandwidth_.store(mean, std::memory_order_relaxed);
  }
  if (!troubled_.load(std::memory_order_relaxed)) return false;
  std::lock_guard lock(mutex_);
  // What was under way before it failed says nothing about it now.
  if (now_ns() - elapsed_ns < last_incident_ns_) return false;
  troubled_ = false;
  told_.clear();
  next_pause_ns_ = 0;
  paused_until_ns_ = 0;
  return open_.exchange(false);
}

bool Rail::failed(uint64_t submitted_ns, const std::string& reason, const RailPolicy& policy) {
  errors.fetch_add(1, std::memory_order_relaxed);
  std::lock_guard lock(mutex_);
  last_error_ = reason;
  if (submitted_ns < last_incident_ns_) return false;
  uint64_t now = now_ns();
  last_incident_ns_ = now;
  // Successes between them do not count: a rail that fails every second slice is no better than one that is
  // cut off.
  while (!incidents_.empty() && now - incidents_.front() > policy.breaker_window_ns) incidents_.pop_front();
  incidents_.push_back(now);
  troubled_ = true;
  // An open breaker lets a trial through when its pause is over; a trial that fails opens it again.
  if (incidents_.size() < policy.breaker_errors && !open_) {
    paused_until_ns_ = now + policy.suspect_pause_ns;
    return false;
  }
  incidents_.clear();
  next_pause_ns_ = next_pause_ns_ == 0 ? policy.breaker_pause_ns
                                       : std::min(2 * next_pause_ns_, policy.breaker_max_pause_ns);
  paused_until_ns_ = now + next_pause_ns_;
  return !open_.exchange(true);
}

void Rail::suspect(const RailPolicy& policy) {
  std::lock_guard lock(mutex_);
  last_incident_ns_ = now_ns();
  troubled_ = true;
  paused_until_ns_ = std::max(paused_until_ns_.load(), last_incident_ns_ + policy.suspect_pause_ns);
}

std::string Rail::last_error() const {
  std::lock_guard lock(mutex_);
  return last_error_;
}

bool Rail::tell(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (told_ == reason) return false;
  told_ = reason;
  return true;
}

}  // namespace mooncake
