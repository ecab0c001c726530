// The shared block of one group: the words of every rank. It holds no data of operations.
#pragma once

#include <atomic>
#include <cstdint>

namespace mooncake::ep::pg {

inline constexpr uint32_t kMaxRanks = 1024;
inline constexpr uint32_t kRankWords = kMaxRanks / 64;
inline constexpr uint64_t kControlMagic = 0x6d63'7067'6374'7231;  // "mcpgctr1"

struct ControlHeader {
  uint64_t magic;
  uint64_t group_id;  // random: memory of another group is not taken for this one's
  uint32_t capacity;
  uint32_t unused;
  // Rung by whoever changes a word while a rank sleeps.
  alignas(64) std::atomic<uint32_t> bell;
  alignas(64) std::atomic<uint64_t> sleeping[kRankWords];
  // Members from the last activation on; every member stores the same.
  alignas(64) std::atomic<uint64_t> snapshot[kRankWords];
};

struct alignas(64) RankWords {
  std::atomic<uint64_t> state;
  // What the round is, by its parity: a rank is at most one round ahead of any other.
  std::atomic<uint64_t> signature[2];
};

struct alignas(64) RankPlace {
  std::atomic<uint64_t> claim;
  std::atomic<uint64_t> activation;
};

struct Control {
  uint8_t* base = nullptr;

  ControlHeader& header() const { return *reinterpret_cast<ControlHeader*>(base); }
  RankWords& words(int rank) const {
    return reinterpret_cast<RankWords*>(base + sizeof(ControlHeader))[rank];
  }
  RankPlace& place(int rank) const {
    auto* after = base + sizeof(ControlHeader) + header().capacity * sizeof(RankWords);
    return reinterpret_cast<RankPlace*>(after)[rank];
  }
  static uint64_t nbytes(uint32_t capacity) {
    return sizeof(ControlHeader) + uint64_t{capacity} * (sizeof(RankWords) + sizeof(RankPlace));
  }
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RankWords) == 64 &&
              sizeof(RankPlace) == 64);

}  // namespace mooncake::ep::pg
