// A FreeSpace in bytes that also knows what it has given away, and so takes back only that. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

#include "free_space.hpp"

namespace mooncake::store {

struct Piece {
  uint64_t offset;
  uint64_t nbytes;
};

class BestFit {
 public:
  static constexpr uint64_t kSmallBytes = FreeSpace::kSmallBytes;

  // A granule is a power of two; the capacity is rounded down to granules.
  BestFit(uint64_t capacity_bytes, uint64_t granule_bytes) : space_(capacity_bytes, granule_bytes) {}

  uint64_t granule_bytes() const { return space_.granule_bytes(); }
  uint64_t capacity_bytes() const { return space_.capacity() * granule_bytes(); }
  uint64_t free_bytes() const { return space_.free() * granule_bytes(); }
  uint64_t largest_hole_bytes() const { return space_.largest_hole() * granule_bytes(); }
  uint64_t rounded(uint64_t nbytes) const { return space_.granules(nbytes) * granule_bytes(); }

  // Pieces in order that add up to `nbytes`, all but the last of whole granules; none for 0 bytes. No value
  // when the largest `max_pieces` holes together are too small.
  std::optional<std::vector<Piece>> allocate(uint64_t nbytes, size_t max_pieces);

  enum class Freed { kOk, kUnknown, kOtherSize };
  // Takes back one piece, exactly as it was given.
  Freed free(uint64_t offset, uint64_t nbytes);

  // Start and bytes taken of everything that is allocated, in no order.
  std::vector<Piece> live() const;

 private:
  FreeSpace space_;
  std::unordered_map<uint64_t, uint64_t> live_;  // start -> size, in granules
};

}  // namespace mooncake::store
