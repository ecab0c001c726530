#include "slots.hpp"

#include <algorithm>
#include <bit>

namespace mooncake::store {

uint32_t Index::find(const Digest& digest) const {
  uint32_t at = head(bucket(digest));
  while (at != kNoSlot && slots_[at].digest != digest) at = slots_[at].next;
  return at;
}

void Index::insert(uint32_t at) {
  uint32_t& first = head(bucket(slots_[at].digest));
  slots_[at].next = first;
  first = at;
  if (++size_ > buckets_) split();
}

void Index::erase(uint32_t at) {
  uint32_t* link = &head(bucket(slots_[at].digest));
  while (*link != at) link = &slots_[*link].next;
  *link = slots_[at].next;
  --size_;
}

uint64_t Index::bucket(const Digest& digest) const {
  // Digests are hashes themselves.
  uint64_t wide = std::bit_ceil(buckets_);
  uint64_t found = digest.low & (wide - 1);
  return found < buckets_ ? found : found & (wide / 2 - 1);
}

void Index::grow() {
  chunks_.push_back(std::make_unique_for_overwrite<uint32_t[]>(1u << kShift));
  std::fill_n(chunks_.back().get(), 1u << kShift, kNoSlot);
}

void Index::split() {
  if ((buckets_ & kMask) == 0) grow();
  uint64_t from = buckets_ - std::bit_floor(buckets_);
  uint64_t to = buckets_++;
  // What the next inserts are going to split.
  constexpr uint64_t kAhead = 8;
  if (uint32_t soon = from + kAhead < buckets_ ? head(from + kAhead) : kNoSlot; soon != kNoSlot) {
    __builtin_prefetch(&slots_[soon]);
  }
  uint32_t* link = &head(from);
  while (*link != kNoSlot) {
    uint32_t at = *link;
    if (bucket(slots_[at].digest) != to) {
      link = &slots_[at].next;
      continue;
    }
    *link = slots_[at].next;
    slots_[at].next = head(to);
    head(to) = at;
  }
}

}  // namespace mooncake::store
