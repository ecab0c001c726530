// How long slices are: by what the device was seen to move.
#pragma once

#include <array>
#include <chrono>
#include <thread>

#include "fabric.hpp"
#include "pace.hpp"

namespace checks {

namespace verbs = mooncake::verbs;

inline uint64_t virtual_ns = 0;

// By a clock of its own: slow devices get short slices, fast ones long ones, within the limits.
inline void check_pace() {
  constexpr uint64_t kMiB = 1 << 20, kMost = 4 * kMiB;
  verbs::Pace pace([] { return virtual_ns; });
  require(pace.slice(kMost, kMost) == kMost, "what is not known does not matter");
  auto run = [&](uint64_t bytes_per_us, int slices) {
    for (int i = 0; i < slices; ++i) {
      pace.posted(kMiB);
      pace.posted(64);  // small ones tell nothing
      virtual_ns += kMiB * 1000 / bytes_per_us;
      pace.done(64);
      pace.done(kMiB);
      pace.measure();
    }
  };
  run(10'000, 4);
  require(pace.slice(kMost, kMost) == 15 * verbs::kSpread,
          "10 GB/s: what it moves in 100 us, in steps of 64 KiB");
  require(pace.slice(2 * verbs::kSpread, kMost) == 2 * verbs::kSpread, "a small share is not exceeded");
  require(pace.slice(kMost, kMiB / 2) == kMiB / 2, "nor is the longest slice");
  virtual_ns += 1'000'000'000;  // a rest is not counted
  run(20'000, 1);
  require(pace.slice(kMost, kMost) > 29 * verbs::kSpread, "a faster sample counts at once");
  run(1'000, 4);
  require(pace.slice(kMost, kMost) > 15 * verbs::kSpread, "a few slow ones do not mean much");
  run(1'000, 60);
  require(pace.slice(kMost, kMost) == verbs::kSpread, "but many do, down to the shortest slice");
  pace.posted(kMiB);
  pace.lost(kMiB);
  run(20'000, 1);
  require(pace.slice(kMost, kMost) > 29 * verbs::kSpread, "lost slices leave the measurement right");
}

inline uint64_t work_requests() {
  std::array<uint64_t, 4> counters{};
  reinterpret_cast<void (*)(uint64_t*)>(symbol("verbs_double_counters"))(counters.data());
  return counters[1];
}

// A device that was slow gets shorter slices than one that nothing is known of.
inline void check_adaptive_slices() {
  constexpr uint64_t kBytesOfOne = 8 << 20;
  Side source(on("double0"), kBytesOfOne, 1), target(on("double1"), kBytesOfOne, 2);
  source.meet(target, 2);
  auto requests_of_one = [&](uint64_t held_ms) {
    uint64_t before = work_requests();
    fabric().frozen[0] = held_ms != 0;
    source.submit(source.op(MC_WRITE, 0, kBytesOfOne, 1));
    if (held_ms != 0) std::this_thread::sleep_for(std::chrono::milliseconds(held_ms));
    fabric().frozen[0] = 0;
    require(source.wait().status == MC_OK, "a write arrives");
    return work_requests() - before;
  };
  source.submit(source.op(MC_WRITE, 0, 64, 1));  // connects
  require(source.wait().status == MC_OK, "a small write arrives");
  require(requests_of_one(200) == 8, "at first, four slices for each queue pair");
  require(requests_of_one(0) == kBytesOfOne / verbs::kSpread, "8 MiB in 200 ms ask for the shortest slices");
  std::memset(source.memory.data(), 5, kBytesOfOne);
  require(requests_of_one(0) < kBytesOfOne / verbs::kSpread, "a fast one makes them longer again");
  require(target.memory == source.memory, "the bytes are there");
}

}  // namespace checks
