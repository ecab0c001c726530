#include "free_space.hpp"

#include <algorithm>
#include <iterator>

namespace mooncake::store {

FreeSpace::FreeSpace(uint64_t capacity_bytes, uint64_t granule_bytes)
    : granule_(granule_bytes),
      capacity_(capacity_bytes / granule_bytes),
      class_width_(std::max<uint64_t>(1, kSmallBytes / granule_bytes / (kClasses - 1))) {
  if (capacity_ != 0) add_hole(0, capacity_);
}

std::optional<Run> FreeSpace::take(uint64_t size, bool small) {
  if (small) {
    if (auto start = highest_hole(size)) {
      auto hole = holes_.find(*start);
      uint64_t left = hole->second - size;
      shorten(hole, *start, left);
      return Run{*start + left, size};
    }
  }
  auto found = by_size_.lower_bound({size, 0});
  if (found == by_size_.end()) return std::nullopt;
  auto [largest, start] = *found;
  shorten(holes_.find(start), start + size, largest - size);
  return Run{start, size};
}

std::optional<Run> FreeSpace::take_most(uint64_t size) {
  return by_size_.empty() ? std::nullopt : take(std::min(size, largest_hole()), false);
}

bool FreeSpace::take_at(Run run) {
  auto hole = holes_.upper_bound(run.start);
  if (hole == holes_.begin()) return false;
  --hole;
  auto [start, size] = *hole;
  if (run.size > size || run.start - start > size - run.size) return false;
  uint64_t end = run.start + run.size, hole_end = start + size;
  shorten(hole, start, run.start - start);
  if (end != hole_end) add_hole(end, hole_end - end);
  return true;
}

void FreeSpace::give_back(Run run) {
  auto [start, size] = run;
  auto right = holes_.lower_bound(start);
  if (right != holes_.begin()) {
    auto left = std::prev(right);
    if (left->first + left->second == start) {
      start = left->first;
      size += left->second;
      drop_hole(left);
    }
  }
  if (right != holes_.end() && right->first == start + size) {
    size += right->second;
    drop_hole(right);
  }
  add_hole(start, size);
}

std::set<uint64_t>& FreeSpace::class_of(uint64_t size) {
  return by_class_[std::min<uint64_t>(size / class_width_, kClasses - 1)];
}

std::optional<uint64_t> FreeSpace::highest_hole(uint64_t size) const {
  // Every hole of these classes holds it. With granules so fine that a class spans many sizes, some of the
  // class below would too; the caller then finds them by size.
  std::optional<uint64_t> highest;
  for (uint64_t i = (size + class_width_ - 1) / class_width_; i < kClasses; ++i) {
    const std::set<uint64_t>& starts = by_class_[i];
    if (!starts.empty() && (!highest || *starts.rbegin() > *highest)) highest = *starts.rbegin();
  }
  return highest;
}

void FreeSpace::add_hole(uint64_t start, uint64_t size) {
  holes_.emplace(start, size);
  by_size_.emplace(size, start);
  class_of(size).insert(start);
  free_ += size;
}

void FreeSpace::drop_hole(Holes::iterator hole) {
  auto [start, size] = *hole;
  class_of(size).erase(start);
  by_size_.erase({size, start});
  holes_.erase(hole);
  free_ -= size;
}

void FreeSpace::shorten(Holes::iterator hole, uint64_t start, uint64_t size) {
  if (size == 0) {
    drop_hole(hole);
    return;
  }
  // The nodes of the trees are used again: most of what is allocated is cut off a hole that stays.
  auto [old_start, old_size] = *hole;
  free_ -= old_size - size;
  auto by_size = by_size_.extract({old_size, old_start});
  by_size.value() = {size, start};
  by_size_.insert(std::move(by_size));
  std::set<uint64_t>&before = class_of(old_size), &after = class_of(size);
  if (&before != &after || old_start != start) {
    auto by_class = before.extract(old_start);
    by_class.value() = start;
    after.insert(std::move(by_class));
  }
  if (old_start == start) {
    hole->second = size;
    return;
  }
  auto node = holes_.extract(hole);
  node.key() = start;
  node.mapped() = size;
  holes_.insert(std::move(node));
}

}  // namespace mooncake::store
