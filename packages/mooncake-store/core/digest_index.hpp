// Things with a digest, by number and by digest: what the object map and the records of tiers lie in. Not
// thread-safe.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

namespace mooncake::store {

inline constexpr uint32_t kNoSlot = std::numeric_limits<uint32_t>::max();

struct Digest {
  uint64_t low, high;
  bool operator==(const Digest&) const = default;
};

// Things by number, which stays the same for a thing's life. Memory comes in chunks, so that growing moves
// and doubles nothing. T has a `next`, which is used here while it is free, and set_free().
template <typename T>
class Chunked {
 public:
  T& operator[](uint32_t at) { return chunks_[at >> kShift][at & kMask]; }
  const T& operator[](uint32_t at) const { return chunks_[at >> kShift][at & kMask]; }
  // Numbers below are or were in use.
  uint32_t end() const { return end_; }
  size_t nbytes() const { return (sizeof(T) << kShift) * chunks_.size(); }

  // An empty one, which is free until it is made something.
  uint32_t add() {
    uint32_t at = free_;
    if (at != kNoSlot) {
      free_ = (*this)[at].next;
    } else {
      if ((end_ & kMask) == 0) chunks_.push_back(std::make_unique_for_overwrite<T[]>(1u << kShift));
      at = end_++;
    }
    (*this)[at] = T{};
    return at;
  }

  void remove(uint32_t at) {
    (*this)[at].set_free();
    (*this)[at].next = free_;
    free_ = at;
  }

 private:
  static constexpr uint32_t kShift = 14, kMask = (1u << kShift) - 1;
  std::vector<std::unique_ptr<T[]>> chunks_;
  uint32_t free_ = kNoSlot;
  uint32_t end_ = 0;
};

// Numbers by digest: linear hashing, which grows by one bucket at a time, so that no insert takes long and
// four bytes a thing are all it costs. T has a `digest` and a `next`, the number of the next one in its
// bucket.
template <typename T>
class DigestIndex {
 public:
  explicit DigestIndex(Chunked<T>& things) : things_(things) { grow(); }

  size_t size() const { return size_; }
  size_t nbytes() const { return (sizeof(uint32_t) << kShift) * chunks_.size(); }
  void prefetch_head(const Digest& digest) const { __builtin_prefetch(&head(bucket(digest))); }
  void prefetch_slot(const Digest& digest) const {
    uint32_t at = head(bucket(digest));
    if (at != kNoSlot) __builtin_prefetch(&things_[at]);
  }

  uint32_t find(const Digest& digest) const { return same_from(head(bucket(digest)), digest); }
  // Another one with the same digest.
  uint32_t next(uint32_t at) const { return same_from(things_[at].next, things_[at].digest); }

  // A caller with many has prefetched their heads.
  void insert(uint32_t at) {
    uint32_t& first = head(bucket(things_[at].digest));
    things_[at].next = first;
    first = at;
    if (++size_ > buckets_) split();
  }

  // It must be there.
  void erase(uint32_t at) {
    uint32_t* link = &head(bucket(things_[at].digest));
    while (*link != at) link = &things_[*link].next;
    *link = things_[at].next;
    --size_;
  }

 private:
  static constexpr uint32_t kShift = 12, kMask = (1u << kShift) - 1;

  uint32_t same_from(uint32_t at, const Digest& digest) const {
    while (at != kNoSlot && things_[at].digest != digest) at = things_[at].next;
    return at;
  }

  uint64_t bucket(const Digest& digest) const {
    // Digests are hashes themselves.
    uint64_t wide = std::bit_ceil(buckets_);
    uint64_t found = digest.low & (wide - 1);
    return found < buckets_ ? found : found & (wide / 2 - 1);
  }

  uint32_t& head(uint64_t bucket) { return chunks_[bucket >> kShift][bucket & kMask]; }
  const uint32_t& head(uint64_t bucket) const { return chunks_[bucket >> kShift][bucket & kMask]; }

  void grow() {
    chunks_.push_back(std::make_unique_for_overwrite<uint32_t[]>(1u << kShift));
    std::fill_n(chunks_.back().get(), 1u << kShift, kNoSlot);
  }

  void split() {
    if ((buckets_ & kMask) == 0) grow();
    uint64_t from = buckets_ - std::bit_floor(buckets_);
    uint64_t to = buckets_++;
    // What the next inserts are going to split.
    constexpr uint64_t kAhead = 8;
    if (uint32_t soon = from + kAhead < buckets_ ? head(from + kAhead) : kNoSlot; soon != kNoSlot) {
      __builtin_prefetch(&things_[soon]);
    }
    uint32_t* link = &head(from);
    while (*link != kNoSlot) {
      uint32_t at = *link;
      if (bucket(things_[at].digest) != to) {
        link = &things_[at].next;
        continue;
      }
      *link = things_[at].next;
      things_[at].next = head(to);
      head(to) = at;
    }
  }

  Chunked<T>& things_;
  std::vector<std::unique_ptr<uint32_t[]>> chunks_;
  uint64_t buckets_ = 1;
  size_t size_ = 0;
};

}  // namespace mooncake::store
