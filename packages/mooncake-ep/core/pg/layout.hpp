// Where things lie in the memory that each process of a group lends to the others. Only its owner writes it.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "control.hpp"

namespace mooncake::ep::pg {

inline constexpr uint64_t kMemoryMagic = 0x6d63'7067'6d65'6d31;  // "mcpgmem1"

struct MemoryHeader {
  uint64_t magic;
  uint64_t group_id;
  uint64_t claim;  // of the process that made it
};

// One direction of messages between two ranks: bytes produced lie with the sender, bytes consumed with the
// receiver. The high bits hold the low bits of the other side's incarnation: counts of another one are zero.
struct alignas(64) Counter {
  std::atomic<uint64_t> value;
};

struct Layout {
  uint64_t capacity;
  uint64_t ring_nbytes;
  uint64_t region_nbytes;

  static Layout of(uint32_t capacity) {
    constexpr uint64_t kGiB = uint64_t{1} << 30;
    return {capacity, capacity <= 64 ? uint64_t{256} << 10 : uint64_t{16} << 10,
            std::min(16 * kGiB, 1024 * kGiB / capacity)};
  }
  uint64_t produced() const { return 4096; }
  uint64_t consumed() const { return produced() + capacity * sizeof(Counter); }
  uint64_t rings() const { return page(consumed() + capacity * sizeof(Counter)); }
  // Inputs and results of operations; neighbours in time use different halves.
  uint64_t inputs(int half) const {
    return page(rings() + capacity * ring_nbytes) + 2 * static_cast<uint64_t>(half) * region_nbytes;
  }
  uint64_t results(int half) const { return inputs(half) + region_nbytes; }
  uint64_t nbytes() const { return inputs(2); }

  static uint64_t page(uint64_t value) { return (value + 4095) / 4096 * 4096; }
};

}  // namespace mooncake::ep::pg
