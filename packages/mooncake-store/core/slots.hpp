// The versions of objects, one cache line each. Not thread-safe.
#pragma once

#include <cstdint>
#include <limits>

#include "digest_index.hpp"

namespace mooncake::store {

inline constexpr uint16_t kNoSegment = std::numeric_limits<uint16_t>::max();

enum class State : uint8_t { kFree, kReserved, kCommitted, kHidden };

// One version of one key. Its bytes are one extent here, or several, in replicas, in the Extra.
struct Slot {
  Digest digest;
  uint64_t version : 48;
  uint64_t segment : 16;
  uint64_t nbytes : 44;
  uint64_t tenant : 16;
  uint64_t priority : 4;
  uint32_t granule;  // where the extent begins in its segment
  uint32_t writer;   // the member that put it
  uint32_t next;     // in its bucket; of a free slot: the next free one
  uint32_t older;    // in the order of eviction
  uint32_t younger;
  uint32_t stamp;  // when it came to its place in that order; wraps around
  uint32_t extra;  // number of its Extra, 0 for none
  uint32_t leases : 20;
  State state : 2;
  uint32_t uses : 2;     // since the clock's hand was here
  uint32_t linked : 1;   // it stands in the order
  uint32_t broken : 1;   // no replica of it is whole any more
  uint32_t level : 5;    // which queue of its tenant it leaves by
  uint32_t partial : 1;  // some replica has lost a segment, and waits for the last lease to be taken away

  void set_free() { state = State::kFree; }
};
static_assert(sizeof(Slot) == 64);

inline constexpr uint32_t kMaxLeases = (1u << 20) - 1;
inline constexpr uint64_t kMaxBytes = (1ull << 44) - 1;

using Slots = Chunked<Slot>;
using Index = DigestIndex<Slot>;

}  // namespace mooncake::store
