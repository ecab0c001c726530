// The words on which all ranks agree. Pure functions of 64-bit values.
//
// A rank's state is one atomic word: the last round that it published, whether it was evicted, and which
// incarnation of the rank it is. For round `seq` it changes once, by compare-and-swap from `seq - 1`: its
// owner makes it `seq` (published), or whoever suspects the owner makes it `seq - 1, evicted`. All others
// only read. So each (round, rank) is decided once, and everyone finds the same decision at any later time.
#pragma once

#include <cstdint>

namespace mooncake::ep::pg {

struct State {
  static constexpr int kSeqBits = 48;
  static constexpr uint64_t kSeqMask = (uint64_t{1} << kSeqBits) - 1;
  static constexpr uint64_t kEvicted = uint64_t{1} << kSeqBits;
  static constexpr int kIncarnationShift = kSeqBits + 1;

  static constexpr uint64_t make(uint64_t incarnation, bool evicted, uint64_t seq) {
    return (incarnation << kIncarnationShift) | (evicted ? kEvicted : 0) | seq;
  }
  static constexpr uint64_t seq(uint64_t word) { return word & kSeqMask; }
  static constexpr bool evicted(uint64_t word) { return (word & kEvicted) != 0; }
  static constexpr uint64_t incarnation(uint64_t word) { return word >> kIncarnationShift; }
};

enum class Arrival { kWaiting, kPublished, kEvicted };

// What a state word says of round `seq` for a member that is known to be `incarnation`.
constexpr Arrival arrival(uint64_t word, uint64_t incarnation, uint64_t seq) {
  uint64_t found = State::incarnation(word);
  if (found != incarnation) return found < incarnation ? Arrival::kWaiting : Arrival::kEvicted;
  if (State::seq(word) >= seq) return Arrival::kPublished;
  return State::evicted(word) ? Arrival::kEvicted : Arrival::kWaiting;
}

// Who holds a rank's place, and where its memory is found: one word, so two claimants cannot mix theirs.
struct Claim {
  static constexpr uint64_t make(uint64_t incarnation, int pid, int fd, bool ready) {
    return (incarnation << 49) | (static_cast<uint64_t>(pid) << 25) | (static_cast<uint64_t>(fd) << 1) |
           (ready ? 1 : 0);
  }
  static constexpr uint64_t incarnation(uint64_t word) { return word >> 49; }
  static constexpr int pid(uint64_t word) { return static_cast<int>((word >> 25) & 0xffffff); }
  static constexpr int fd(uint64_t word) { return static_cast<int>((word >> 1) & 0xffffff); }
  static constexpr bool ready(uint64_t word) { return (word & 1) != 0; }
};

// At which round which incarnation of a rank became a member.
struct Activation {
  static constexpr uint64_t make(uint64_t incarnation, uint64_t seq) { return (incarnation << 48) | seq; }
  static constexpr uint64_t incarnation(uint64_t word) { return word >> 48; }
  static constexpr uint64_t seq(uint64_t word) { return word & State::kSeqMask; }
};

}  // namespace mooncake::ep::pg
