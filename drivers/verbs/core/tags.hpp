// What tells completions of one queue pair from those of another, also of one that is gone.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mooncake::verbs {

class QueuePair;

// A tag is a slot, in its lower half, and how often the slot was given away. Not thread-safe.
class Tags {
 public:
  // So many queue pairs of an endpoint are told apart; there is no tag for one more.
  static constexpr size_t kMost = size_t{1} << 16;

  size_t free() const { return kMost - used_; }
  // There must be a free one.
  uint32_t give(QueuePair* qp) {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(slots_.size()));
      slots_.emplace_back();
    }
    uint32_t slot = free_.back();
    free_.pop_back();
    ++used_;
    slots_[slot].qp = qp;
    return uint32_t{++slots_[slot].generation} << 16 | slot;
  }
  // Null for a tag whose queue pair is gone.
  QueuePair* find(uint32_t tag) const {
    uint32_t slot = tag & 0xffff;
    if (slot >= slots_.size() || slots_[slot].generation != tag >> 16) return nullptr;
    return slots_[slot].qp;
  }
  void take_back(uint32_t tag) {
    slots_[tag & 0xffff].qp = nullptr;
    free_.push_back(tag & 0xffff);
    --used_;
  }

 private:
  struct Slot {
    QueuePair* qp = nullptr;
    uint16_t generation = 0;
  };
  std::vector<Slot> slots_;
  std::vector<uint32_t> free_;
  size_t used_ = 0;
};

}  // namespace mooncake::verbs
