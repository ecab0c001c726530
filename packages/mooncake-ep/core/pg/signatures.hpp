// What an operation is, in one word: ranks compare it in every round.
#pragma once

#include <cstdint>

#include "../kernels/reduce.hpp"

namespace mooncake::ep::pg {

// From 16 on: smaller numbers are the group's own.
enum class Kind : uint64_t {
  kBarrier = 16,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kGather,
  kBroadcast,
  kScatter,
  kAllToAll,
};

inline uint64_t sign(Kind kind, uint64_t first = 0, uint64_t second = 0) {
  uint64_t hash = static_cast<uint64_t>(kind) << 56;
  hash ^= (first + 1) * 0x9e3779b97f4a7c15u >> 9;
  return hash ^ (second + 1) * 0xbf58476d1ce4e5b9u >> 11;
}

inline uint64_t sign(Kind kind, const Reduction& reduction, uint64_t nbytes, int root = 0) {
  auto what = static_cast<uint64_t>(reduction.type) * 64 + static_cast<uint64_t>(reduction.op);
  return sign(kind, nbytes, what * 2048 + static_cast<uint64_t>(root));
}

}  // namespace mooncake::ep::pg
