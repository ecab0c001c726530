// What goes into the calls of an object map that handle a batch, and what comes out of them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "segments.hpp"

namespace mooncake::store {

// What became of one key of a batch; the numbers are those of protocol.Outcome.
enum class Outcome : uint8_t { kPlaced, kExists, kFull, kStored, kLost, kFailed, kQuota };

// Rows of 5 numbers: position in the batch, offset inside the value, segment's id, offset inside the
// segment, bytes.
using Rows = std::vector<uint64_t>;

struct PutOptions {
  Wish wish;
  uint16_t tenant = 0;
  uint8_t priority = 0;
  uint8_t replicas = 1;
  bool replace = false;
  bool hard_pin = false;
  double soft_until_s = 0;  // 0: no soft pin
  std::string group, session;
  std::vector<uint64_t> avoid;
  double now_s = 0;
};

struct Reserved {
  std::vector<Outcome> outcomes;
  std::vector<uint32_t> slots;  // of those placed
  Rows rows;
  bool wait = false;  // room may come by itself: something is being read or written, or retires
};

struct Located {
  std::vector<uint64_t> sizes;  // 0 where nothing was found
  std::vector<uint8_t> found;
  std::vector<uint32_t> slots;  // of those found, each with one lease more
  std::vector<Rows> replicas;   // the nearest replica of each, then the next nearest of those with two, ...
};

struct Counts {
  uint64_t stored = 0, evicted = 0, removed = 0, lost = 0, copied = 0, corrupt = 0;
};

// What became of the records of a page.
struct Adoption {
  uint64_t adopted = 0, waiting = 0, refused = 0;
};

}  // namespace mooncake::store
