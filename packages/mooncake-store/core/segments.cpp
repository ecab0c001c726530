#include "segments.hpp"

#include <algorithm>

namespace mooncake::store {

namespace {

constexpr int kOthers = 1 << 20;  // after every preferred segment: the writer's own, its node's, the rest

}  // namespace

std::optional<uint16_t> Segments::find(uint64_t id) const {
  auto found = by_id_.find(id);
  return found == by_id_.end() ? std::nullopt : std::optional(found->second);
}

bool Segments::add(uint64_t id, uint32_t owner, uint64_t node, uint64_t nbytes, bool confirms) {
  if (by_id_.count(id) != 0 || nbytes / granule_ > std::numeric_limits<uint32_t>::max()) return false;
  uint16_t number;
  if (!free_numbers_.empty()) {
    number = free_numbers_.back();
    free_numbers_.pop_back();
  } else {
    if (segments_.size() >= kNoSegment) return false;
    number = static_cast<uint16_t>(segments_.size());
    segments_.emplace_back();
  }
  segments_[number] = std::make_unique<Segment>(
      Segment{.id = id, .owner = owner, .node = node, .confirms = confirms, .space = {nbytes, granule_}});
  by_id_[id] = number;
  return true;
}

void Segments::drop(uint16_t number) {
  Segment& segment = *segments_[number];
  by_id_.erase(segment.id);
  segment.there = false;
  segment.used.fill(0);
  segment.value_bytes = 0;
  if (segment.extents == 0) free_numbers_.push_back(number);
}

std::vector<uint16_t> Segments::usable(const std::vector<uint64_t>& avoid) const {
  std::vector<uint16_t> found;
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = *segments_[i];
    if (!segment.there || !segment.open) continue;
    if (std::find(avoid.begin(), avoid.end(), segment.id) == avoid.end()) {
      found.push_back(static_cast<uint16_t>(i));
    }
  }
  return found;
}

uint64_t Segments::free_bytes() const {
  uint64_t sum = 0;
  for (auto& segment : segments_) sum += segment->there ? segment->space.free() : 0;
  return sum * granule_;
}

uint64_t Segments::open_free_bytes() const {
  uint64_t sum = 0;
  for (auto& segment : segments_) sum += segment->there && segment->open ? segment->space.free() : 0;
  return sum * granule_;
}

uint64_t Segments::open_capacity_bytes() const {
  uint64_t sum = 0;
  for (auto& segment : segments_) sum += segment->there && segment->open ? segment->space.capacity() : 0;
  return sum * granule_;
}

uint64_t Segments::capacity_bytes() const {
  uint64_t sum = 0;
  for (auto& segment : segments_) sum += segment->there ? segment->space.capacity() : 0;
  return sum * granule_;
}

uint64_t Segments::used_bytes(Use use) const {
  uint64_t sum = 0;
  for (auto& segment : segments_) sum += segment->used[static_cast<size_t>(use)];
  return sum * granule_;
}

bool Segments::place(uint64_t nbytes, const std::vector<uint16_t>& usable, const Wish& wish, uint8_t replica,
                     std::vector<Extent>& extents) {
  if (nbytes == 0) return true;
  if (wish.stripes > 1 && stripe(nbytes, usable, wish, replica, extents)) return true;
  std::vector<bool> tried;
  uint64_t wanted = taken(nbytes) / granule_;
  for (;;) {
    size_t best = usable.size();
    int best_rank = 0;
    for (size_t i = 0; i < usable.size(); ++i) {
      const Segment& segment = *segments_[usable[i]];
      if ((!tried.empty() && tried[i]) || segment.space.free() < wanted) continue;
      int rank = this->rank(segment, wish);
      if (best == usable.size() || rank < best_rank ||
          (rank == best_rank && segment.space.free() > segments_[usable[best]]->space.free())) {
        best = i, best_rank = rank;
      }
    }
    if (best == usable.size()) return spread(nbytes, usable, replica, extents);
    if (fill(usable[best], nbytes, replica, kMaxExtents, extents)) return true;
    tried.resize(usable.size());
    tried[best] = true;
  }
}

bool Segments::take_at(const Extent& extent) {
  uint64_t size = taken(extent.nbytes) / granule_;
  return segments_[extent.segment]->space.take_at({extent.granule, size});
}

void Segments::give_back(const Extent& extent) {
  Segment& segment = *segments_[extent.segment];
  if (segment.there) segment.space.give_back({extent.granule, taken(extent.nbytes) / granule_});
}

void Segments::let_go(const Extent& extent) {
  Segment& segment = *segments_[extent.segment];
  if (--segment.extents == 0 && !segment.there) free_numbers_.push_back(extent.segment);
}

void Segments::book(const Extent& extent, Use use, int sign) {
  Segment& segment = *segments_[extent.segment];
  if (!segment.there) return;
  uint64_t size = taken(extent.nbytes) / granule_;
  segment.used[static_cast<size_t>(use)] += sign > 0 ? size : -size;
  segment.value_bytes += sign > 0 ? extent.nbytes : -extent.nbytes;
}

int Segments::rank(const Segment& segment, const Wish& wish) const {
  auto found = std::find(wish.preferred.begin(), wish.preferred.end(), segment.id);
  if (found != wish.preferred.end()) return static_cast<int>(found - wish.preferred.begin());
  if (segment.owner == wish.writer) return kOthers;
  return wish.same_node && wish.node != 0 && segment.node == wish.node ? kOthers + 1 : kOthers + 2;
}

bool Segments::fill(uint16_t number, uint64_t nbytes, uint8_t replica, size_t most,
                    std::vector<Extent>& extents) {
  FreeSpace& space = segments_[number]->space;
  size_t before = extents.size();
  uint64_t missing = nbytes;
  while (missing != 0 && extents.size() - before < most) {
    // The hole that suits all the rest, else the largest there is: that needs the fewest pieces.
    uint64_t wanted = taken(missing) / granule_;
    auto run = space.take(wanted, nbytes <= FreeSpace::kSmallBytes && missing == nbytes);
    if (!run) run = space.take_most(wanted);
    if (!run) break;
    uint64_t filled = run->size == wanted ? missing : run->size * granule_;
    extents.push_back({number, replica, static_cast<uint32_t>(run->start), filled});
    missing -= filled;
  }
  if (missing == 0) return true;
  for (; extents.size() > before; extents.pop_back()) give_back(extents.back());
  return false;
}

bool Segments::stripe(uint64_t nbytes, const std::vector<uint16_t>& usable, const Wish& wish, uint8_t replica,
                      std::vector<Extent>& extents) {
  std::vector<uint16_t> order = usable;
  auto worth = [&](uint16_t number) {
    const Segment& segment = *segments_[number];
    return std::pair(rank(segment, wish), ~segment.space.free());
  };
  std::sort(order.begin(), order.end(), [&](uint16_t a, uint16_t b) { return worth(a) < worth(b); });
  size_t before = extents.size();
  uint64_t most = std::min<uint64_t>({wish.stripes, kMaxExtents, order.size(), nbytes / kLeastStripe});
  for (uint64_t pieces = most; pieces > 1; --pieces) {
    uint64_t part = taken((nbytes + pieces - 1) / pieces), missing = nbytes;
    std::vector<uint32_t> owners;
    for (uint16_t number : order) {
      uint32_t owner = segments_[number]->owner;
      if (missing == 0 || std::find(owners.begin(), owners.end(), owner) != owners.end()) continue;
      uint64_t size = std::min(part, missing);
      if (!fill(number, size, replica, kMaxExtents / pieces, extents)) continue;
      owners.push_back(owner);
      missing -= size;
    }
    if (missing == 0) return true;
    for (; extents.size() > before; extents.pop_back()) give_back(extents.back());
  }
  return false;
}

bool Segments::spread(uint64_t nbytes, const std::vector<uint16_t>& usable, uint8_t replica,
                      std::vector<Extent>& extents) {
  // Largest holes first, wherever they are: with a fixed number of extents nothing else can hold more.
  size_t before = extents.size();
  uint64_t missing = nbytes;
  while (missing != 0 && extents.size() - before < kMaxExtents) {
    uint16_t largest = kNoSegment;
    uint64_t hole = 0;
    for (uint16_t number : usable) {
      uint64_t found = segments_[number]->space.largest_hole();
      if (found > hole) largest = number, hole = found;
    }
    if (largest == kNoSegment) break;
    uint64_t part = std::min(hole * granule_, missing);
    if (!fill(largest, part, replica, 1, extents)) break;
    missing -= part;
  }
  if (missing == 0) return true;
  for (; extents.size() > before; extents.pop_back()) give_back(extents.back());
  return false;
}

}  // namespace mooncake::store
