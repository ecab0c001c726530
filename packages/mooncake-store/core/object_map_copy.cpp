// How replicas of objects come beside those that are there, and how they leave while the object stays.
#include <algorithm>
#include <set>

#include "object_map.hpp"

namespace mooncake::store {

namespace {

std::vector<uint8_t> numbers_of(const std::vector<Extent>& extents) {
  std::vector<uint8_t> found;
  for (const Extent& extent : extents) {
    if (std::find(found.begin(), found.end(), extent.replica) == found.end()) found.push_back(extent.replica);
  }
  return found;
}

uint8_t first_unused(const std::vector<Extent>& extents) {
  std::vector<uint8_t> used = numbers_of(extents);
  uint8_t number = 0;
  while (std::find(used.begin(), used.end(), number) != used.end()) ++number;
  return number;
}

}  // namespace

std::vector<Extent> ObjectMap::staying(uint32_t at, uint64_t leaving) const {
  std::vector<Extent> all = extents(at), found;
  for (uint8_t number : numbers_of(all)) {
    bool stays = is_whole(all, number);
    for (const Extent& extent : all) {
      if (extent.replica == number) stays &= !extent.leaving && segments_[extent.segment].id != leaving;
    }
    for (const Extent& extent : all) {
      if (stays && extent.replica == number) found.push_back(extent);
    }
  }
  return found;
}

uint8_t ObjectMap::source_of(const std::vector<Extent>& all, uint32_t mover) const {
  uint8_t best = kMaxReplicas;
  for (uint8_t number : numbers_of(all)) {
    if (!is_whole(all, number)) continue;
    bool own = std::any_of(all.begin(), all.end(), [&](const Extent& extent) {
      return extent.replica == number && segments_[extent.segment].owner == mover;
    });
    if (own) return number;
    if (best == kMaxReplicas) best = number;
  }
  return best;
}

// Where an owner has (some of) it, even if that is to leave, no other replica comes.
std::vector<uint16_t> ObjectMap::places_for_copy(uint32_t at, const CopyWish& wish) const {
  uint64_t target = wish.target;
  std::vector<Extent> taken = extents(at);
  if (target == 0 && !wish.avoid.empty()) {
    std::vector<uint16_t> best = elsewhere(segments_.usable(wish.avoid), taken);
    if (!best.empty()) return best;
  }
  std::vector<uint16_t> usable = segments_.usable({});
  if (target != 0) std::erase_if(usable, [&](uint16_t number) { return segments_[number].id != target; });
  return elsewhere(usable, taken);
}

Copied ObjectMap::may_copy(const Ref& ref, const CopyWish& wish) const {
  if (!is_current(slots_, ref) || slots_[ref.at].state != State::kCommitted) return Copied::kGone;
  if (copying_.count(ref.at) != 0 || slots_[ref.at].leases == kMaxLeases) return Copied::kBusy;
  std::vector<Extent> others = staying(ref.at, wish.leaving);
  bool there = slots_[ref.at].nbytes == 0;  // and nowhere at all
  for (const Extent& extent : others) there |= segments_[extent.segment].id == wish.target;
  if (there) return Copied::kThere;
  bool room = numbers_of(others).size() < kMaxReplicas && numbers_of(extents(ref.at)).size() < kMaxReplicas;
  return room && !places_for_copy(ref.at, wish).empty() ? Copied::kPending : Copied::kNowhere;
}

CopyBegun ObjectMap::copy_begin(const Ref& ref, const CopyWish& wish) {
  CopyBegun begun;
  begun.outcome = may_copy(ref, wish);
  if (begun.outcome != Copied::kPending) return begun;
  // What is to leave its segment may turn out to be what everybody can best do without.
  bool expendable = wish.evicts && wish.leaving != 0;
  if (!expendable) begin_lease(ref.at);
  begun.outcome = room_for_copy(ref, wish, found_);
  if (begun.outcome != Copied::kPending) {
    if (!expendable) end_lease(ref.at);
    return begun;
  }
  if (expendable) begin_lease(ref.at);
  Slot& slot = slots_[ref.at];
  begun.nbytes = slot.nbytes;
  begun.slot = slots_.add();
  Slot& room = slots_[begun.slot];
  room.digest = slot.digest;
  room.version = next_version_++;
  room.nbytes = slot.nbytes;
  room.tenant = slot.tenant;
  room.priority = slot.priority;
  room.writer = wish.mover;
  room.state = State::kReserved;
  room.level = slot.level;
  set_extents(begun.slot, found_);
  book(begun.slot, 1);
  std::vector<Extent> all = extents(ref.at);
  uint8_t source = source_of(all, wish.mover);
  add_rows(begun.source, 0, all, source);
  add_rows(begun.target, 0, found_, 0);
  copies_[begun.slot] = {ref, source, wish.leaving};
  copying_.insert(ref.at);
  return begun;
}

Copied ObjectMap::room_for_copy(const Ref& ref, const CopyWish& wish, std::vector<Extent>& found) {
  found.clear();
  awaited_bytes_ = 0;
  uint64_t nbytes = slots_[ref.at].nbytes, taken = segments_.taken(nbytes);
  auto tenant = static_cast<uint16_t>(slots_[ref.at].tenant);
  if (wish.bounded && !(wish.evicts ? within_quota(tenant, taken) : fits_quota(tenant, taken)))
    return Copied::kQuota;
  std::vector<uint16_t> usable = places_for_copy(ref.at, wish);
  PutOptions put;
  put.wish.writer = wish.mover;
  // For a place of its own choice nothing else leaves: what left first could be anywhere.
  bool placed = wish.evicts && wish.target == 0 ? make_room(nbytes, put, usable, 0, found, ref.at)
                                                : segments_.place(nbytes, usable, put.wish, 0, found);
  bool gone = !is_current(slots_, ref) || slots_[ref.at].state != State::kCommitted;
  if (placed && !gone) return Copied::kPending;
  for (const Extent& extent : found) segments_.give_back(extent);
  found.clear();
  return gone ? Copied::kGone : Copied::kFull;
}

Copied ObjectMap::copy_end(uint32_t at, std::string_view key, double now_s) {
  auto found = copies_.find(at);
  if (found == copies_.end()) {  // given up before
    free(at);
    return Copied::kLost;
  }
  Copy copy = found->second;
  Copied outcome = may_join(at, copy);
  if (outcome == Copied::kPending) {
    join(at, copy, key, now_s);
    outcome = Copied::kStored;
    copies_.erase(at);
  }
  // The lease goes last: replicas leave when nobody reads any more.
  copying_.erase(copy.source.at);
  end_lease(copy.source.at);
  if (outcome != Copied::kStored) {
    copies_.erase(at);
    free(at);
  }
  return outcome;
}

void ObjectMap::copy_give_up(uint32_t at) {
  auto found = copies_.find(at);
  if (found == copies_.end()) return;
  uint32_t source = found->second.source.at;
  copies_.erase(found);
  copying_.erase(source);
  end_lease(source);
}

// It is leased, so its slot and its replicas are still the ones that the copy began with.
Copied ObjectMap::may_join(uint32_t at, const Copy& copy) const {
  const Slot &slot = slots_[copy.source.at], &room = slots_[at];
  if (slot.state != State::kCommitted || slot.broken) return Copied::kGone;
  std::vector<Extent> all = extents(copy.source.at);
  if (room.broken || room.partial || !is_whole(all, copy.replica)) return Copied::kLost;
  return Copied::kPending;
}

void ObjectMap::join(uint32_t at, const Copy& copy, std::string_view key, double now_s) {
  uint32_t to = copy.source.at;
  std::vector<Extent> all = extents(to), added = extents(at);
  uint8_t number = first_unused(all);
  book(at, -1);
  if (slots_[at].extra != 0) {
    extras_[slots_[at].extra].extents.clear();
    drop_extra(at);
  }
  slots_[at].segment = kNoSegment;
  slots_.remove(at);
  for (Extent& extent : added) {
    extent.replica = number;
    segments_.book(extent, use_of(slots_[to]), 1);
    all.push_back(extent);
  }
  extra(to).extents = std::move(all);
  slots_[to].segment = kNoSegment;
  ++counts_.copied;
  tell_stored(to, key, now_s);
  // Until its owner knows of the copy, the next master would not find it.
  for (const Extent& extent : added) {
    const Segment& segment = segments_[extent.segment];
    RecordStream* owner = segment.confirms ? stream(segment.owner) : nullptr;
    if (owner == nullptr || owner->unread() == 0) continue;
    if (copy.leaving != 0 && owner->hurry()) to_ring_.push_back(segment.owner);
    arrivals_[segment.owner].push_back({owner->last(), copy.source});
    ++extra(to).arriving;
  }
  if (copy.leaving != 0) let_leave(to, copy.leaving);
}

void ObjectMap::arrived(const Ref& ref) {
  if (!is_current(slots_, ref) || slots_[ref.at].extra == 0) return;
  Slot& slot = slots_[ref.at];
  Extra& more = extras_[slot.extra];
  if (more.arriving == 0 || --more.arriving != 0) return;
  if (slot.partial && slot.state == State::kCommitted && slot.leases == 0) prune(ref.at);
}

// New readers go to other replicas at once; the room is free when nobody reads any more.
void ObjectMap::let_leave(uint32_t at, uint64_t segment) {
  Slot& slot = slots_[at];
  Extra& more = extra(at);
  std::vector<uint8_t> going;
  for (const Extent& extent : more.extents) {
    if (segments_[extent.segment].id == segment) going.push_back(extent.replica);
  }
  for (Extent& extent : more.extents) {
    extent.leaving |= std::find(going.begin(), going.end(), extent.replica) != going.end();
  }
  slot.partial = 1;
  if (slot.state == State::kCommitted && slot.leases == 0) prune(at);
  mend(at);
}

Evacuation ObjectMap::lying_in(uint64_t id, uint32_t from, uint32_t most_slots, uint64_t most_bytes) {
  Evacuation found;
  auto number = segments_.find(id);
  uint32_t end = number ? slots_.end() : from;
  uint64_t bytes = 0;
  for (found.next = from; found.next < end && most_slots-- != 0 && bytes < most_bytes; ++found.next) {
    uint32_t at = found.next;
    Slot& slot = slots_[at];
    bool here = false, leaves = true;
    if (slot.state == State::kFree) continue;
    each_extent(slot, [&](const Extent& extent) {
      if (extent.segment == *number) here = true, leaves &= extent.leaving;
    });
    if (!here) continue;
    if (slot.state == State::kReserved) {
      ++found.reserved;
    } else if (slot.state == State::kHidden) {
      ++found.leased;
    } else if (copying_.count(at) != 0) {
      ++found.copying;
    } else if (leaves) {
      ++(extras_[slot.extra].arriving != 0 ? found.arriving : found.leased);
    } else if (kept_elsewhere(at, id) >= wanted_replicas(at)) {
      let_leave(at, id);
      if (extras_[slot.extra].arriving != 0)
        ++found.arriving;
      else
        found.leased += slot.leases != 0;
    } else {
      bytes += slot.nbytes;
      found.todo.push_back({at, slot.version});
    }
  }
  if (found.next >= end) found.next = kNoSlot;
  return found;
}

// How many replicas stay when those in a segment have left, and those in others that are to become empty.
size_t ObjectMap::kept_elsewhere(uint32_t at, uint64_t leaving) const {
  std::vector<Extent> others = staying(at, leaving);
  std::vector<uint8_t> kept = numbers_of(others);
  for (const Extent& extent : others) {
    if (!segments_[extent.segment].open) std::erase(kept, extent.replica);
  }
  return kept.size();
}

bool ObjectMap::relinquish(const Ref& ref, uint64_t segment) {
  if (!is_current(slots_, ref) || slots_[ref.at].state != State::kCommitted) return true;
  if (kept_elsewhere(ref.at, segment) == 0) return false;
  let_leave(ref.at, segment);
  return true;
}

bool ObjectMap::condemn(uint32_t at, uint64_t segment) {
  if (slots_[at].state != State::kCommitted || !lies_in(std::span(&at, 1), segment)) return false;
  ++counts_.corrupt;
  if (staying(at, segment).empty()) {
    hide(at, kNoSlot);
  } else {
    let_leave(at, segment);
  }
  return true;
}

bool ObjectMap::lies_in(std::span<const uint32_t> slots, uint64_t id) const {
  auto number = segments_.find(id);
  bool found = false;
  for (uint32_t at : slots) {
    each_extent(slots_[at], [&](const Extent& extent) { found |= number && extent.segment == *number; });
  }
  return found;
}

std::vector<uint64_t> ObjectMap::segments_of(std::span<const uint32_t> slots) const {
  std::set<uint64_t> found;
  for (uint32_t at : slots) {
    each_extent(slots_[at], [&](const Extent& extent) { found.insert(segments_[extent.segment].id); });
  }
  return {found.begin(), found.end()};
}

std::vector<Whereabouts> ObjectMap::whereabouts(std::span<const Digest> digests) const {
  std::vector<Whereabouts> all;
  for (uint32_t at : find(digests)) {
    Whereabouts& found = all.emplace_back();
    if (at == kNoSlot) continue;
    std::vector<Extent> extents = staying(at, 0);
    found.ref = {at, slots_[at].version};
    found.replicas = static_cast<uint32_t>(numbers_of(extents).size());
    for (const Extent& extent : extents) {
      if (found.mover == 0) found.mover = segments_[extent.segment].owner;
      found.segments.push_back(segments_[extent.segment].id);
    }
  }
  return all;
}

std::vector<uint8_t> ObjectMap::want(std::span<const Digest> digests, uint8_t replicas) {
  std::vector<uint8_t> there;
  for (uint32_t at : find(digests)) {
    there.push_back(at != kNoSlot);
    if (at == kNoSlot || slots_[at].nbytes == 0) continue;
    uint8_t before = wanted_replicas(at);
    if (before != replicas) extra(at).replicas = replicas;
    std::vector<Extent> extents = staying(at, 0);
    std::vector<uint8_t> numbers = numbers_of(extents);
    for (size_t i = replicas; i < numbers.size(); ++i) {
      for (const Extent& extent : extents) {
        if (extent.replica == numbers[i]) let_leave(at, segments_[extent.segment].id);
      }
    }
    if (before != replicas) tell_changed(at);
    mend(at);
  }
  return there;
}

void ObjectMap::mend(uint32_t at) {
  const Slot& slot = slots_[at];
  if (slot.extra == 0 || extras_[slot.extra].mending || slot.state != State::kCommitted) return;
  if (slot.nbytes == 0 || numbers_of(staying(at, 0)).size() >= wanted_replicas(at)) return;
  extras_[slot.extra].mending = true;
  to_mend_.push_back({at, slot.version});
}

std::vector<Mending> ObjectMap::take_mending(size_t most) {
  std::vector<Mending> found;
  for (; !to_mend_.empty() && found.size() < most; to_mend_.pop_front()) {
    Ref ref = to_mend_.front();
    if (!is_current(slots_, ref) || slots_[ref.at].state != State::kCommitted) continue;
    std::vector<Extent> all = staying(ref.at, 0);
    if (!all.empty() && numbers_of(all).size() < wanted_replicas(ref.at)) {
      found.push_back({ref, segments_[all[0].segment].owner});
    } else {
      extras_[slots_[ref.at].extra].mending = false;
    }
  }
  return found;
}

void ObjectMap::mended(const Ref& ref) {
  if (!is_current(slots_, ref) || slots_[ref.at].extra == 0) return;
  extras_[slots_[ref.at].extra].mending = false;
  mend(ref.at);
}

}  // namespace mooncake::store
