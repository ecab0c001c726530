// For how long a waiting thread polls before it sleeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace mooncake {

// Polling pays when the end is a few microseconds away, because waking up takes longer. It does not when the
// wait is long, or when somebody else needs the core, who may be the very one to bring the end. So polls that
// see nothing make the next ones rarer, and a thread that lost its core while it polled stops for a while.
// Shared by threads; a lost update only shifts the guess.
class SpinBudget {
 public:
  static constexpr uint64_t kMostNs = 50'000;
  static constexpr uint64_t kLostCoreNs = 200'000;  // between two polls in a row

  uint64_t ns(uint64_t now) {
    if (now < off_until_ns_.load(std::memory_order_relaxed)) return 0;
    uint32_t misses = misses_.load(std::memory_order_relaxed);
    if (misses < kFreeMisses) return kMostNs;
    uint32_t rarity = (1u << std::min(misses - kFreeMisses, kMostHalvings)) - 1;
    return (turn_.fetch_add(1, std::memory_order_relaxed) & rarity) == 0 ? kMostNs : 0;
  }
  void hit() {
    if (misses_.load(std::memory_order_relaxed) != 0) misses_.store(0, std::memory_order_relaxed);
  }
  void miss() { misses_.fetch_add(1, std::memory_order_relaxed); }
  void lost_core(uint64_t now) { off_until_ns_.store(now + kOffNs, std::memory_order_relaxed); }

 private:
  static constexpr uint32_t kFreeMisses = 4;
  static constexpr uint32_t kMostHalvings = 7;
  static constexpr uint64_t kOffNs = 5'000'000;
  std::atomic<uint32_t> misses_{0};
  std::atomic<uint32_t> turn_{0};
  std::atomic<uint64_t> off_until_ns_{0};
};

}  // namespace mooncake
