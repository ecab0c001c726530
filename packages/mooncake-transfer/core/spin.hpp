// For how long a waiting thread polls before it sleeps.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace mooncake {

// Between two looks.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Polling pays when the end is a few microseconds away, because waking up takes longer. It does not when the
// wait is long, or when somebody else needs the core, who may be the very one to bring the end. So polls that
// see nothing make the next ones rarer, and a thread that lost its core while it polled stops for a while.
// Shared by threads; a lost update only shifts the guess.
class SpinBudget {
 public:
  static constexpr uint64_t kMostNs = 50'000;       // and what the bytes take
  static constexpr uint64_t kLostCoreNs = 200'000;  // between two polls in a row

  // For how long to poll for the end of a transfer of so many bytes.
  uint64_t ns(uint64_t now, uint64_t bytes) { return at_most(now, kMostNs + bytes / kSlowestBytesPerNs); }
  // For how long to poll for something that takes `most` nanoseconds where polling pays.
  uint64_t at_most(uint64_t now, uint64_t most) {
    if (now < off_until_ns_.load(std::memory_order_relaxed)) return 0;
    uint32_t misses = misses_.load(std::memory_order_relaxed);
    if (misses < kFreeMisses) return most;
    uint32_t rarity = (1u << std::min(misses - kFreeMisses, kMostHalvings)) - 1;
    return (turn_.fetch_add(1, std::memory_order_relaxed) & rarity) == 0 ? most : 0;
  }
  void hit() {
    if (misses_.load(std::memory_order_relaxed) != 0) misses_.store(0, std::memory_order_relaxed);
  }
  void miss() { misses_.fetch_add(1, std::memory_order_relaxed); }
  void lost_core(uint64_t now) { off_until_ns_.store(now + kOffNs, std::memory_order_relaxed); }

 private:
  // Of what is worth polling for. A thread that gives up before the last byte is there sleeps, which makes
  // its peer wait, who then sleeps too: both would go on so, at half the speed.
  static constexpr uint64_t kSlowestBytesPerNs = 4;
  static constexpr uint32_t kFreeMisses = 4;
  static constexpr uint32_t kMostHalvings = 7;
  static constexpr uint64_t kOffNs = 5'000'000;
  std::atomic<uint32_t> misses_{0};
  std::atomic<uint32_t> turn_{0};
  std::atomic<uint64_t> off_until_ns_{0};
};

}  // namespace mooncake
