// Finds out, while it copies, which store instructions suit batches of a size.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <mutex>

#include "../copy.hpp"

namespace mooncake::driver {

// Whether stores through the cache or past it are faster, and in which order of pages, depends on the
// processor, on how many cores copy, and on whether the same memory is used again while it is still cached:
// on one machine 16 MiB that are copied again and again move at 26 GB/s past the cache and at 43 through it,
// and 64 MiB at 26 and 18. So nothing is assumed: now and then a few batches in a row go the other ways, and
// the fastest one stays. Thread-safe.
class StoreTuner {
 public:
  struct Choice {
    Stores stores = Stores::kCached;
    bool counts = false;  // note() is worth calling
    size_t size_class = 0;
    uint32_t round = 0;
  };

  Choice choose(uint64_t bytes);
  // How long the copies of a batch took, the time of all threads together.
  void note(const Choice& choice, uint64_t bytes, uint64_t ns);

 private:
  static constexpr size_t kWays = 3;
  static constexpr size_t kClasses = 64;  // by the logarithm of the size
  static constexpr uint32_t kTrialBatches =
      4;  // of one way in a row; the first one finds the cache in disorder
  static constexpr uint32_t kFirstInterval = 8;    // batches between trials, as long as something changes ...
  static constexpr uint32_t kMostInterval = 4096;  // ... and when nothing has for long
  static constexpr double kClearly = 0.95;         // of the time: less of a difference is noise

  struct SizeClass {
    size_t best = static_cast<size_t>(Stores::kStreamingInTurns);
    size_t trying = 0;  // so many after the best one
    uint32_t left = kFirstInterval;
    uint32_t interval = kFirstInterval;
    uint32_t round = 0;
    std::array<double, kWays> ns_per_byte = kUnknown;
  };
  static constexpr double kNever = std::numeric_limits<double>::infinity();
  static constexpr std::array<double, kWays> kUnknown = {kNever, kNever, kNever};

  static void judge(SizeClass& of);

  std::mutex mutex_;
  std::array<SizeClass, kClasses> classes_;
};

}  // namespace mooncake::driver
