// The holes of one segment: exact best fit on granules, small values apart from large ones. Knows numbers
// only, no memory, and keeps nothing about what it has given away. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace mooncake::store {

// Granules `start` to `start + size`.
struct Run {
  uint64_t start;
  uint64_t size;
};

// Large values take the smallest hole that holds them, at its low end. Values of up to kSmallBytes take the
// hole with the highest address that holds them, at its high end: they gather at the end of the segment, in
// an area that has no border and grows and shrinks as holes there come and go. Spread over the smallest holes
// they would sit between large neighbours and keep the holes that these leave from merging.
class FreeSpace {
 public:
  static constexpr uint64_t kSmallBytes = 64u << 10;

  // A granule is a power of two; the capacity is rounded down to granules.
  FreeSpace(uint64_t capacity_bytes, uint64_t granule_bytes);

  uint64_t granule_bytes() const { return granule_; }
  uint64_t capacity() const { return capacity_; }  // granules, as the next two
  uint64_t free() const { return free_; }
  uint64_t largest_hole() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }
  uint64_t granules(uint64_t nbytes) const { return nbytes / granule_ + (nbytes % granule_ != 0); }

  // One run of exactly this size, not 0, at the place that suits a small value or a large one; none when no
  // hole is that large.
  std::optional<Run> take(uint64_t size, bool small);
  // The largest run there is, of at most this size.
  std::optional<Run> take_most(uint64_t size);
  // This very run; false when something of it is taken already.
  bool take_at(Run run);
  void give_back(Run run);

 private:
  using Holes = std::map<uint64_t, uint64_t>;
  // Holes by address are kept apart by size, so that the highest one that holds a small value is found at
  // once.
  static constexpr size_t kClasses = 17;

  std::set<uint64_t>& class_of(uint64_t size);
  std::optional<uint64_t> highest_hole(uint64_t size) const;
  void add_hole(uint64_t start, uint64_t size);
  void drop_hole(Holes::iterator hole);
  void shorten(Holes::iterator hole, uint64_t start, uint64_t size);

  // All in granules but the granule itself.
  uint64_t granule_;
  uint64_t capacity_;
  uint64_t class_width_;
  uint64_t free_ = 0;
  Holes holes_;                                        // start -> size
  std::set<std::pair<uint64_t, uint64_t>> by_size_;    // size, start
  std::array<std::set<uint64_t>, kClasses> by_class_;  // starts
};

}  // namespace mooncake::store
