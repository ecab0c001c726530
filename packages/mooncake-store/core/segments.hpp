// The segments lent to the store, and where in them a value goes. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "free_space.hpp"
#include "slots.hpp"

namespace mooncake::store {

inline constexpr size_t kMaxExtents = 4;           // of a replica; why: MAX_EXTENTS of config.py
inline constexpr uint64_t kLeastStripe = 1 << 20;  // bytes; smaller pieces take no less time together

// What bytes that are not free are good for now. Retiring ones are of no object any more, but their owner
// has not confirmed yet that it knows.
enum class Use : uint8_t { kReserved, kEvictable, kLeased, kKept, kRetiring };
inline constexpr size_t kUses = 5;

// One piece of a replica.
struct Extent {
  uint16_t segment;
  uint8_t replica;
  uint32_t granule;
  uint64_t nbytes;
  bool leaving = false;  // the replica goes when nobody reads the object any more
};

struct Segment {
  uint64_t id;
  uint32_t owner;  // the member that lends it
  uint64_t node;   // of its owner, 0 when it is not known
  bool confirms;   // room is handed out again only when the owner has confirmed that it is free
  FreeSpace space;
  std::array<uint64_t, kUses> used{};  // granules
  uint64_t value_bytes = 0;            // of what lies in them; less than they are
  uint64_t extents = 0;                // that slots name; the number is used again when there are none
  bool there = true;
  bool open = true;  // takes new values
};

// What a put wants of the place of its value.
struct Wish {
  uint32_t writer = 0;
  uint64_t node = 0;
  bool same_node = false;
  std::vector<uint64_t> preferred;  // ids of segments, best first
  uint8_t stripes = 1;              // owners that share a large value
};

class Segments {
 public:
  explicit Segments(uint64_t granule_bytes) : granule_(granule_bytes) {}

  uint64_t granule_bytes() const { return granule_; }
  Segment& operator[](uint16_t number) { return *segments_[number]; }
  const Segment& operator[](uint16_t number) const { return *segments_[number]; }
  size_t end() const { return segments_.size(); }
  size_t size() const { return by_id_.size(); }
  std::optional<uint16_t> find(uint64_t id) const;

  // False when there is one of that id already, no number is left, or it has more than 2^32 granules.
  bool add(uint64_t id, uint32_t owner, uint64_t node, uint64_t nbytes, bool confirms);
  void drop(uint16_t number);

  // Numbers of those in which something may be placed, but those with an id in `avoid`.
  std::vector<uint16_t> usable(const std::vector<uint64_t>& avoid) const;
  uint64_t free_bytes() const;
  // Of those that take new values.
  uint64_t open_free_bytes() const;
  uint64_t open_capacity_bytes() const;
  uint64_t capacity_bytes() const;
  uint64_t used_bytes(Use use) const;
  uint64_t taken(uint64_t nbytes) const { return (nbytes / granule_ + (nbytes % granule_ != 0)) * granule_; }

  // Room for one replica, appended to `extents`; false, and nothing taken, when it does not fit in
  // kMaxExtents. In stripes if that is wished and possible. Else in the first of these that has room: a
  // preferred segment, the writer's own, one of its node if it wishes, the emptiest; else across several,
  // largest holes first.
  bool place(uint64_t nbytes, const std::vector<uint16_t>& usable, const Wish& wish, uint8_t replica,
             std::vector<Extent>& extents);
  // One extent exactly where it is; false when something is there already.
  bool take_at(const Extent& extent);
  void give_back(const Extent& extent);
  // The extent is of a slot, or not any more.
  void hold(const Extent& extent) { ++segments_[extent.segment]->extents; }
  void let_go(const Extent& extent);
  void book(const Extent& extent, Use use, int sign);

 private:
  int rank(const Segment& segment, const Wish& wish) const;
  bool fill(uint16_t number, uint64_t nbytes, uint8_t replica, size_t most, std::vector<Extent>& extents);
  // In equal pieces with different owners, as many as there are with room.
  bool stripe(uint64_t nbytes, const std::vector<uint16_t>& usable, const Wish& wish, uint8_t replica,
              std::vector<Extent>& extents);
  bool spread(uint64_t nbytes, const std::vector<uint16_t>& usable, uint8_t replica,
              std::vector<Extent>& extents);

  const uint64_t granule_;
  std::vector<std::unique_ptr<Segment>> segments_;
  std::vector<uint16_t> free_numbers_;
  std::unordered_map<uint64_t, uint16_t> by_id_;
};

}  // namespace mooncake::store
