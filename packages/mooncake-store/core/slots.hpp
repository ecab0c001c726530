// The versions of objects, one cache line each, and where they are found by digest. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace mooncake::store {

inline constexpr uint32_t kNoSlot = std::numeric_limits<uint32_t>::max();
inline constexpr uint16_t kNoSegment = std::numeric_limits<uint16_t>::max();

struct Digest {
  uint64_t low, high;
  bool operator==(const Digest&) const = default;
};

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
};
static_assert(sizeof(Slot) == 64);

inline constexpr uint32_t kMaxLeases = (1u << 20) - 1;
inline constexpr uint64_t kMaxBytes = (1ull << 44) - 1;

// Slots by number, which stays the same for a version's life. Memory comes in chunks, so that growing moves
// and doubles nothing.
class Slots {
 public:
  Slot& operator[](uint32_t at) { return chunks_[at >> kShift][at & kMask]; }
  const Slot& operator[](uint32_t at) const { return chunks_[at >> kShift][at & kMask]; }
  // Numbers below are or were in use.
  uint32_t end() const { return end_; }

  // An empty slot, which is kFree until its state is set.
  uint32_t add() {
    uint32_t at = free_;
    if (at != kNoSlot) {
      free_ = (*this)[at].next;
    } else {
      if ((end_ & kMask) == 0) chunks_.push_back(std::make_unique_for_overwrite<Slot[]>(1u << kShift));
      at = end_++;
    }
    (*this)[at] = Slot{};
    return at;
  }

  void remove(uint32_t at) {
    (*this)[at].state = State::kFree;
    (*this)[at].next = free_;
    free_ = at;
  }

 private:
  static constexpr uint32_t kShift = 14, kMask = (1u << kShift) - 1;
  std::vector<std::unique_ptr<Slot[]>> chunks_;
  uint32_t free_ = kNoSlot;
  uint32_t end_ = 0;
};

// Slots by digest: linear hashing, which grows by one bucket at a time, so that no insert takes long and four
// bytes an object are all it costs.
class Index {
 public:
  explicit Index(Slots& slots) : slots_(slots) { grow(); }

  size_t size() const { return size_; }
  void prefetch_head(const Digest& digest) const { __builtin_prefetch(&head(bucket(digest))); }
  void prefetch_slot(const Digest& digest) const {
    uint32_t at = head(bucket(digest));
    if (at != kNoSlot) __builtin_prefetch(&slots_[at]);
  }
  uint32_t find(const Digest& digest) const;
  // The digest must not be there yet, or must be there. A caller with many has prefetched their heads.
  void insert(uint32_t at);
  void erase(uint32_t at);

 private:
  static constexpr uint32_t kShift = 12, kMask = (1u << kShift) - 1;

  uint64_t bucket(const Digest& digest) const;
  uint32_t& head(uint64_t bucket) { return chunks_[bucket >> kShift][bucket & kMask]; }
  const uint32_t& head(uint64_t bucket) const { return chunks_[bucket >> kShift][bucket & kMask]; }
  void grow();
  void split();

  Slots& slots_;
  std::vector<std::unique_ptr<uint32_t[]>> chunks_;
  uint64_t buckets_ = 1;
  size_t size_ = 0;
};

}  // namespace mooncake::store
