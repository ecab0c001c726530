// How much the device moves a second, as measured, and how long slices are therefore.
#pragma once

#include <algorithm>
#include <cstdint>

#include "support/os.hpp"

namespace mooncake::verbs {

// Slices from this size on go over the queue pairs in turn, and are what the device's pace is told by.
constexpr uint64_t kSpread = 64 << 10;

// Not thread-safe. The clock is read when long slices begin after a rest, and about once for 8 MiB of them.
class Pace {
 public:
  // A slice lasts so long. What waits behind it (other operations, a cancellation) waits no longer on a slow
  // rail than on a fast one; and on a fast one a work request is worth its cost.
  static constexpr uint64_t kSliceNs = 100'000;

  explicit Pace(uint64_t (*clock)() = driver::now_ns) : clock_(clock) {}

  void posted(uint64_t bytes) {
    if (bytes < kSpread || under_way_++ > 0) return;
    since_ns_ = clock_();
    moved_ = 0;
  }
  void done(uint64_t bytes) {
    if (bytes < kSpread) return;
    --under_way_;
    moved_ += bytes;
  }
  void lost(uint64_t bytes) {
    if (bytes >= kSpread) --under_way_;
  }
  // After completions were taken.
  void measure() {
    if (moved_ < (under_way_ > 0 ? kSample : kLeastSample)) return;
    uint64_t now = clock_();
    uint64_t spent_ns = std::max<uint64_t>(now - since_ns_, 1);
    double sample = static_cast<double>(moved_) / static_cast<double>(spent_ns);
    // Up at once and down by and by: whoever fetches completions late makes the device look slow.
    rate_ = std::max(sample, rate_ + (sample - rate_) / 8);
    since_ns_ = now;
    moved_ = 0;
  }

  // For an operation of which `share` bytes would keep every queue pair busy; at most `most`.
  uint32_t slice(uint64_t share, uint64_t most) const {
    uint64_t wanted = share;
    if (rate_ > 0) wanted = std::min(wanted, static_cast<uint64_t>(rate_ * kSliceNs));
    wanted = wanted / kSpread * kSpread;
    return static_cast<uint32_t>(std::clamp<uint64_t>(wanted, std::min(kSpread, most), most));
  }

 private:
  static constexpr uint64_t kSample = 8 << 20, kLeastSample = 1 << 20;

  uint64_t (*const clock_)();
  uint64_t under_way_ = 0;  // slices
  uint64_t since_ns_ = 0, moved_ = 0;
  double rate_ = 0;  // bytes a nanosecond; 0: not known
};

}  // namespace mooncake::verbs
