// What happens to objects that are there: they are found, read, hidden, lost and freed.
#include "object_map.hpp"

#include <algorithm>

namespace mooncake::store {

ObjectMap::ObjectMap(uint64_t granule_bytes, double evict_reserve, Orders::Kind kind, Orders::Make make,
                     uint64_t first_version)
    : orders_(slots_, kind, std::move(make)),
      segments_(granule_bytes),
      next_version_(first_version),
      evict_reserve_(evict_reserve) {
  tenant("");
}

bool ObjectMap::add_segment(uint64_t id, uint32_t owner, uint64_t node, uint64_t nbytes, bool confirms) {
  return segments_.add(id, owner, node, nbytes, confirms);
}

void ObjectMap::drop_segment(uint64_t id) {
  auto number = segments_.find(id);
  if (!number) return;
  auto& retired = retired_[segments_[*number].owner];
  std::erase_if(retired, [&](const Retired& entry) {
    if (entry.extent.segment != *number) return false;
    segments_.let_go(entry.extent);
    return true;
  });
  Segment& segment = segments_[*number];
  ++segment.extents;  // its number stays until all is done
  forget_waiting(id);
  segments_.drop(*number);
  for (uint32_t at = 0; at < slots_.end(); ++at) {
    Slot& slot = slots_[at];
    if (slot.state == State::kFree || slot.broken) continue;
    bool hit = false;
    each_extent(slot, [&](const Extent& extent) { hit |= extent.segment == *number; });
    if (hit) lose(at);
  }
  segments_.let_go({*number, 0, 0, 0});
}

void ObjectMap::drop_member(uint32_t member) {
  streams_.erase(member);
  auto arrivals = std::move(arrivals_[member]);
  arrivals_.erase(member);
  for (const Arrival& arrival : arrivals) arrived(arrival.ref);
}

void ObjectMap::open_segment(uint64_t id, bool open) {
  if (auto number = segments_.find(id)) segments_[*number].open = open;
}

std::vector<uint32_t> ObjectMap::find(std::span<const Digest> digests) const {
  // Memory is what this waits for: all of a batch is fetched at the same time.
  for (const Digest& digest : digests) index_.prefetch_head(digest);
  for (const Digest& digest : digests) index_.prefetch_slot(digest);
  std::vector<uint32_t> found;
  found.reserve(digests.size());
  for (const Digest& digest : digests) found.push_back(index_.find(digest));
  return found;
}

std::vector<uint8_t> ObjectMap::exist(std::span<const Digest> digests) const {
  std::vector<uint8_t> there;
  there.reserve(digests.size());
  for (uint32_t at : find(digests)) there.push_back(at != kNoSlot);
  return there;
}

std::vector<uint64_t> ObjectMap::sizes(std::span<const Digest> digests) const {
  std::vector<uint64_t> found;
  found.reserve(digests.size());
  for (uint32_t at : find(digests)) found.push_back(at == kNoSlot ? kMissing : uint64_t{slots_[at].nbytes});
  return found;
}

std::vector<Digest> ObjectMap::own(std::span<const Digest> digests, uint16_t tenant) const {
  std::vector<Digest> asked(digests.begin(), digests.end());
  std::vector<uint32_t> found = find(digests);
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] != kNoSlot && slots_[found[i]].tenant != tenant) asked[i] = Digest{};
  }
  return asked;
}

std::vector<ObjectMap::TenantRoom> ObjectMap::tenants() const {
  std::vector<TenantRoom> rooms;
  for (const Tenant& tenant : tenants_) rooms.push_back({tenant.name, tenant.used, tenant.quota});
  return rooms;
}

Located ObjectMap::locate(std::span<const Digest> digests, uint32_t reader, uint64_t node) {
  Located located;
  located.replicas.emplace_back();
  std::vector<uint32_t> found = find(digests);
  for (size_t i = 0; i < found.size(); ++i) {
    bool there = found[i] != kNoSlot && slots_[found[i]].leases != kMaxLeases;
    located.found.push_back(there);
    located.sizes.push_back(there ? slots_[found[i]].nbytes : 0);
    if (!there) continue;
    begin_lease(found[i]);
    located.slots.push_back(found[i]);
    locate_one(found[i], i, reader, node, located);
  }
  // Tail first, so that the blocks of a prefix are younger than what builds on them.
  for (size_t i = located.slots.size(); i-- != 0;) orders_.touch(located.slots[i]);
  return located;
}

void ObjectMap::locate_one(uint32_t at, uint64_t position, uint32_t reader, uint64_t node, Located& located) {
  const Slot& slot = slots_[at];
  if (slot.extra == 0 || extras_[slot.extra].extents.empty()) {
    if (slot.segment == kNoSegment) return;
    uint64_t offset = slot.granule * segments_.granule_bytes();
    uint64_t segment = segments_[static_cast<uint16_t>(slot.segment)].id;
    located.replicas[0].insert(located.replicas[0].end(), {position, 0, segment, offset, slot.nbytes});
    return;
  }
  const std::vector<Extent>& all = extras_[slot.extra].extents;
  std::vector<std::pair<uint64_t, uint8_t>> order;  // how far, replica
  for (const Extent& extent : all) {
    uint8_t replica = extent.replica;
    if (!order.empty() && order.back().second == replica) continue;
    if (!is_whole(all, replica) || extent.leaving) continue;
    const Segment& segment = segments_[extent.segment];
    uint64_t far = segment.owner == reader ? 0 : node != 0 && segment.node == node ? 1 : 2;
    // Readers that are equally far from several are spread over them.
    order.push_back({far << 32 | ((slot.version + reader + replica) & 0xff), replica});
  }
  std::sort(order.begin(), order.end());
  if (located.replicas.size() < order.size()) located.replicas.resize(order.size());
  for (size_t i = 0; i < order.size(); ++i) {
    add_rows(located.replicas[i], position, all, order[i].second);
  }
}

void ObjectMap::add_rows(Rows& rows, uint64_t position, const std::vector<Extent>& extents,
                         int replica) const {
  uint64_t inside = 0;
  for (const Extent& extent : extents) {
    if (extent.replica != replica) continue;
    uint64_t offset = extent.granule * segments_.granule_bytes();
    rows.insert(rows.end(), {position, inside, segments_[extent.segment].id, offset, extent.nbytes});
    inside += extent.nbytes;
  }
}

std::vector<uint32_t> ObjectMap::release(std::span<const uint32_t> slots) {
  std::vector<uint32_t> broken;
  for (uint32_t at : slots) __builtin_prefetch(&slots_[at]);
  for (size_t i = 0; i < slots.size(); ++i) {
    if (slots_[slots[i]].broken) broken.push_back(static_cast<uint32_t>(i));
  }
  for (size_t i = slots.size(); i-- != 0;) end_lease(slots[i]);
  return broken;
}

void ObjectMap::begin_lease(uint32_t at) {
  Slot& slot = slots_[at];
  if (slot.leases != 0) {
    ++slot.leases;
    return;
  }
  book(at, -1);
  slot.leases = 1;
  book(at, 1);
  orders_.pin(at);
}

void ObjectMap::end_lease(uint32_t at) {
  Slot& slot = slots_[at];
  if (slot.leases != 1) {
    --slot.leases;
    return;
  }
  if (slot.state == State::kHidden) {
    slot.leases = 0;
    free(at);
    return;
  }
  book(at, -1);
  slot.leases = 0;
  book(at, 1);
  if (slot.partial) prune(at);
  orders_.unpin(at);
}

std::vector<uint8_t> ObjectMap::remove(std::span<const Digest> digests) {
  std::vector<uint8_t> there;
  for (const Digest& digest : digests) {
    uint32_t at = index_.find(digest);
    there.push_back(at != kNoSlot);
    departed_.note(digest, next_version_ - 1);
    if (at == kNoSlot) continue;
    ++counts_.removed;
    hide(at, kNoSlot);
  }
  return there;
}

uint64_t ObjectMap::remove_tenant(uint16_t tenant) {
  uint64_t before = counts_.removed;
  departed_.note_tenant(tenant, next_version_ - 1);
  for (uint32_t at = 0; at < slots_.end(); ++at) {
    if (slots_[at].state != State::kCommitted || slots_[at].tenant != tenant) continue;
    ++counts_.removed;
    hide(at, kNoSlot);
  }
  return counts_.removed - before;
}

void ObjectMap::hide(uint32_t at, uint32_t successor) {
  index_.erase(at);
  orders_.remove(at);
  tell_gone(at, successor);
  book(at, -1);
  slots_[at].state = State::kHidden;
  book(at, 1);
  if (slots_[at].leases == 0) free(at);
}

void ObjectMap::free(uint32_t at) {
  Slot& slot = slots_[at];
  bool was_known = slot.state == State::kHidden;
  book(at, -1);
  each_extent(slot, [&](const Extent& extent) { free_extent(extent, slot.tenant, was_known); });
  if (slot.extra != 0) drop_extra(at);
  sums_.set(at, 0);
  slots_.remove(at);
}

void ObjectMap::free_extent(const Extent& extent, uint64_t tenant, bool was_known) {
  tenants_[tenant].used -= segments_.taken(extent.nbytes);
  let_go(extent, was_known);
}

void ObjectMap::let_go(const Extent& extent, bool was_known) {
  Segment& segment = segments_[extent.segment];
  RecordStream* owner = segment.there && segment.confirms && was_known ? stream(segment.owner) : nullptr;
  if (owner != nullptr && owner->unread() != 0) {
    // Its owner may still hold it for the value's, and say so to the next master.
    segments_.book(extent, Use::kRetiring, 1);
    retired_[segment.owner].push_back({owner->last(), extent});
    return;
  }
  segments_.give_back(extent);
  segments_.let_go(extent);
}

void ObjectMap::confirm(uint32_t member, uint64_t seen) {
  RecordStream* found = stream(member);
  if (found == nullptr) return;
  found->confirm(seen);
  auto arrivals = arrivals_.find(member);
  while (arrivals != arrivals_.end() && !arrivals->second.empty() &&
         arrivals->second.front().number <= found->seen()) {
    Ref ref = arrivals->second.front().ref;
    arrivals->second.pop_front();
    arrived(ref);
  }
  auto retired = retired_.find(member);
  if (retired == retired_.end()) return;
  while (!retired->second.empty() && retired->second.front().number <= found->seen()) {
    const Extent& extent = retired->second.front().extent;
    segments_.book(extent, Use::kRetiring, -1);
    segments_.give_back(extent);
    segments_.let_go(extent);
    retired->second.pop_front();
  }
}

void ObjectMap::lose(uint32_t at) {
  Slot& slot = slots_[at];
  std::vector<Extent> all = extents(at);
  bool whole = std::any_of(all.begin(), all.end(),
                           [&](const Extent& extent) { return is_whole(all, extent.replica); });
  if (whole) {
    slot.partial = 1;
    // Where what was to replace them is lost, replicas that were leaving stay.
    if (staying(at, 0).empty()) {
      for (Extent& extent : extras_[slot.extra].extents) extent.leaving = false;
    }
    // Somebody may read what is left of the replica, or write to it.
    if (slot.state == State::kCommitted && slot.leases == 0) prune(at);
    mend(at);
    return;
  }
  slot.broken = 1;
  if (slot.state != State::kCommitted) return;
  ++counts_.lost;
  hide(at, kNoSlot);
}

void ObjectMap::prune(uint32_t at) {
  Slot& slot = slots_[at];
  bool was_known = slot.state == State::kCommitted;
  bool settled = extras_[slot.extra].arriving == 0, leaving = false;
  std::vector<Extent> all = extents(at), kept;
  for (const Extent& extent : all) {
    if (is_whole(all, extent.replica) && !(extent.leaving && settled)) {
      kept.push_back(extent);
      leaving |= extent.leaving;
      continue;
    }
    segments_.book(extent, use_of(slot), -1);
    Segment& segment = segments_[extent.segment];
    if (segment.there && was_known) {
      RecordHead head{
          static_cast<uint8_t>(RecordKind::kGone), 0, 0, 0, sizeof(RecordHead), slot.version, slot.digest};
      send(segment.owner, {reinterpret_cast<const char*>(&head), sizeof(head)});
    }
    free_extent(extent, slot.tenant, was_known);
  }
  slot.partial = leaving;
  extras_[slot.extra].extents = std::move(kept);
}

std::vector<Extent> ObjectMap::extents(uint32_t at) const {
  std::vector<Extent> found;
  each_extent(slots_[at], [&](const Extent& extent) { found.push_back(extent); });
  return found;
}

bool ObjectMap::is_whole(const std::vector<Extent>& extents, uint8_t replica) const {
  return std::all_of(extents.begin(), extents.end(), [&](const Extent& extent) {
    return extent.replica != replica || segments_[extent.segment].there;
  });
}

void ObjectMap::set_extents(uint32_t at, const std::vector<Extent>& extents) {
  Slot& slot = slots_[at];
  for (const Extent& extent : extents) {
    segments_.hold(extent);
    tenants_[slot.tenant].used += segments_.taken(extent.nbytes);
  }
  slot.segment = kNoSegment;
  // The slot itself has no place for the number of a replica, which others may still join.
  if (extents.size() == 1 && extents[0].replica == 0) {
    slot.segment = extents[0].segment;
    slot.granule = extents[0].granule;
  } else if (!extents.empty()) {
    extra(at).extents = extents;
  }
}

ObjectMap::Extra& ObjectMap::extra(uint32_t at) {
  Slot& slot = slots_[at];
  if (slot.extra == 0) {
    if (free_extra_ == 0) {
      slot.extra = static_cast<uint32_t>(extras_.size());
      extras_.emplace_back();
    } else {
      slot.extra = free_extra_;
      free_extra_ = extras_[slot.extra].next;
      extras_[slot.extra] = {};
    }
  }
  return extras_[slot.extra];
}

void ObjectMap::drop_extra(uint32_t at) {
  uint32_t number = slots_[at].extra;
  Extra& gone = extras_[number];
  slots_[at].state = State::kFree;  // before its crowds look for who is left
  if (gone.group != 0) groups_.leave(gone.group);
  if (gone.session != 0) sessions_.leave(gone.session);
  gone = {};
  gone.next = free_extra_;
  free_extra_ = number;
}

Use ObjectMap::use_of(const Slot& slot) const {
  if (slot.state == State::kReserved) return Use::kReserved;
  if (slot.state == State::kHidden || slot.leases != 0) return Use::kLeased;
  return slot.level == Orders::kKept ? Use::kKept : Use::kEvictable;
}

void ObjectMap::book(uint32_t at, int sign) {
  Use use = use_of(slots_[at]);
  each_extent(slots_[at], [&](const Extent& extent) { segments_.book(extent, use, sign); });
}

}  // namespace mooncake::store
