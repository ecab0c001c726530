// How objects come: room is found or made, and what is written becomes findable.
#include <algorithm>

#include "object_map.hpp"

namespace mooncake::store {

namespace {

// Names of groups and sessions are a tenant's own.
std::string scoped(uint16_t tenant, const std::string& name) { return std::to_string(tenant) + ":" + name; }

}  // namespace

Reserved ObjectMap::reserve(std::span<const Digest> digests, std::span<const uint64_t> sizes,
                            const PutOptions& put) {
  expire_pins(put.now_s);
  Reserved reserved;
  reserved.outcomes.assign(digests.size(), Outcome::kPlaced);
  std::vector<uint32_t> there;
  // The blocks of one batch belong together: what is there of them must not make room for the others.
  if (!put.replace) {
    std::vector<uint32_t> found = find(digests);
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] == kNoSlot) continue;
      reserved.outcomes[i] = Outcome::kExists;
      if (slots_[found[i]].leases == kMaxLeases) continue;
      begin_lease(found[i]);
      there.push_back(found[i]);
    }
  }
  for (size_t i = there.size(); i-- != 0;) orders_.touch(there[i]);
  std::vector<uint16_t> usable = segments_.usable(put.avoid);
  uint64_t own_bytes = 0;
  bool full = false;
  awaited_bytes_ = 0;
  for (size_t i = 0; i < digests.size(); ++i) {
    if (reserved.outcomes[i] != Outcome::kPlaced) continue;
    uint32_t at = reserve_one(digests[i], sizes[i], put, usable, found_, reserved.outcomes[i]);
    full |= at == kNoSlot;
    if (at == kNoSlot) continue;
    reserved.slots.push_back(at);
    for (const Extent& extent : found_) own_bytes += segments_.taken(extent.nbytes);
    for (uint8_t replica = 0; replica < put.replicas; ++replica) add_rows(reserved.rows, i, found_, replica);
  }
  for (size_t i = there.size(); i-- != 0;) end_lease(there[i]);
  // Waiting does not help with what this batch itself has taken. A segment that takes nothing yet, as its
  // owner's ledger is on its way, soon does.
  uint64_t others = segments_.used_bytes(Use::kLeased) + segments_.used_bytes(Use::kReserved) +
                    segments_.used_bytes(Use::kRetiring);
  bool may_open = segments_.open_capacity_bytes() != segments_.capacity_bytes();
  reserved.wait = full && (others > own_bytes || may_open);
  return reserved;
}

uint32_t ObjectMap::reserve_one(const Digest& digest, uint64_t nbytes, const PutOptions& put,
                                const std::vector<uint16_t>& usable, std::vector<Extent>& found,
                                Outcome& outcome) {
  found.clear();
  if (nbytes > kMaxBytes) {
    outcome = Outcome::kFull;
  } else if (!within_quota(put.tenant, segments_.taken(nbytes) * put.replicas)) {
    outcome = Outcome::kQuota;
  } else if (!make_room(nbytes, put, usable, 0, found)) {
    outcome = Outcome::kFull;
  }
  if (outcome != Outcome::kPlaced) return kNoSlot;
  for (uint8_t replica = 1; replica < put.replicas && nbytes != 0; ++replica) {
    // As many as there are owners for; one of them makes a value.
    if (!make_room(nbytes, put, elsewhere(usable, found), replica, found)) break;
  }
  uint32_t at = slots_.add();
  Slot& slot = slots_[at];
  slot.digest = digest;
  slot.version = next_version_++;
  slot.nbytes = nbytes;
  slot.tenant = put.tenant;
  slot.priority = put.priority;
  slot.writer = put.wish.writer;
  slot.state = State::kReserved;
  slot.level = put.hard_pin ? Orders::kKept : put.soft_until_s > 0 ? Orders::kSoft : level_of(slot);
  set_extents(at, found);
  if (put.replicas > 1) extra(at).replicas = std::min(put.replicas, kMaxReplicas);
  if (put.soft_until_s > 0) extra(at).soft_until_s = put.soft_until_s;
  if (!put.group.empty()) extra(at).group = groups_.join(scoped(put.tenant, put.group), at);
  if (!put.session.empty()) extra(at).session = sessions_.join(scoped(put.tenant, put.session), at);
  book(at, 1);
  return at;
}

bool ObjectMap::fits_quota(uint16_t tenant, uint64_t nbytes) const {
  const Tenant& own = tenants_[tenant];
  return own.quota == 0 || own.used + nbytes <= own.quota;
}

bool ObjectMap::within_quota(uint16_t tenant, uint64_t nbytes) {
  if (fits_quota(tenant, nbytes)) return true;
  const Tenant& own = tenants_[tenant];
  if (!own.evicts_own || nbytes > own.quota) return false;
  while (own.used + nbytes > own.quota) {
    uint32_t victim = orders_.victim(tenant);
    if (victim == kNoSlot) return false;
    evict(victim);
  }
  return true;
}

bool ObjectMap::make_room(uint64_t nbytes, const PutOptions& put, const std::vector<uint16_t>& usable,
                          uint8_t replica, std::vector<Extent>& found, uint32_t expendable) {
  if (segments_.place(nbytes, usable, put.wish, replica, found)) return true;
  auto sum = [&](std::initializer_list<Use> uses) {
    uint64_t granules = 0;
    for (uint16_t number : usable) {
      granules += segments_[number].space.free();
      for (Use use : uses) granules += segments_[number].used[static_cast<size_t>(use)];
    }
    return granules * segments_.granule_bytes();
  };
  // What was evicted for this batch and comes later is for the keys before this one first.
  uint64_t wanted = awaited_bytes_ + segments_.taken(nbytes);
  // When evicting everything would not do, nothing is evicted.
  if (sum({Use::kEvictable, Use::kRetiring}) < wanted) return false;
  for (;;) {
    if (sum({}) >= nbytes && segments_.place(nbytes, usable, put.wish, replica, found)) break;
    uint64_t coming = 0;
    for (uint16_t number : usable) coming += segments_[number].used[static_cast<size_t>(Use::kRetiring)];
    bool comes = coming * segments_.granule_bytes() >= wanted;
    uint32_t victim = comes ? kNoSlot : orders_.victim(std::nullopt);
    if (victim == kNoSlot) {
      if (comes) awaited_bytes_ = wanted;
      if (comes) evict_reserve();
      return false;
    }
    evict(victim);
    if (expendable != kNoSlot && slots_[expendable].state != State::kCommitted) return false;
  }
  evict_reserve();
  return true;
}

std::vector<uint16_t> ObjectMap::elsewhere(const std::vector<uint16_t>& usable,
                                           const std::vector<Extent>& extents) const {
  std::vector<uint16_t> others, other_nodes;
  for (uint16_t number : usable) {
    const Segment& segment = segments_[number];
    bool same_owner = false, same_node = false;
    for (const Extent& extent : extents) {
      const Segment& taken = segments_[extent.segment];
      same_owner |= taken.owner == segment.owner;
      same_node |= taken.node != 0 && taken.node == segment.node;
    }
    if (same_owner) continue;
    others.push_back(number);
    if (!same_node) other_nodes.push_back(number);
  }
  return other_nodes.empty() ? others : other_nodes;
}

void ObjectMap::evict_reserve() {
  // Room for the next puts, so that not every one of them has to evict; never at the price of a value that
  // is larger than the reserve.
  auto wanted = static_cast<int64_t>(evict_reserve_ * static_cast<double>(segments_.open_capacity_bytes()));
  int64_t missing =
      wanted - static_cast<int64_t>(segments_.open_free_bytes() + segments_.used_bytes(Use::kRetiring));
  while (missing > 0) {
    uint32_t victim = orders_.victim(std::nullopt);
    if (victim == kNoSlot) return;
    int64_t size = 0;
    each_extent(slots_[victim], [&](const Extent& extent) {
      if (segments_[extent.segment].there) size += static_cast<int64_t>(segments_.taken(extent.nbytes));
    });
    if (size <= 0 || size > missing) return;
    evict(victim);
    missing -= size;
  }
}

void ObjectMap::evict(uint32_t at) {
  uint32_t group = slots_[at].extra == 0 ? 0 : extras_[slots_[at].extra].group;
  std::vector<uint32_t> leaving{at};
  if (group != 0) {
    for (uint32_t member : groups_.members(group)) {
      const Slot& slot = slots_[member];
      bool may = slot.state == State::kCommitted && slot.leases == 0 && slot.level < Orders::kSoft;
      if (may && member != at) leaving.push_back(member);
    }
  }
  for (uint32_t member : leaving) {
    ++counts_.evicted;
    departed_.note(slots_[member].digest, slots_[member].version);
    hide(member, kNoSlot);
  }
}

std::vector<Outcome> ObjectMap::commit(std::span<const uint32_t> slots, std::span<const uint8_t> failed,
                                       std::span<const std::string_view> keys, bool replace, double now_s) {
  for (uint32_t at : slots) index_.prefetch_head(slots_[at].digest);
  std::vector<Outcome> outcomes;
  outcomes.reserve(slots.size());
  std::vector<uint32_t> stored;
  stored.reserve(slots.size());
  for (size_t i = 0; i < slots.size(); ++i) {
    if (failed[i]) {
      outcomes.push_back(Outcome::kFailed);
      continue;
    }
    outcomes.push_back(commit_one(slots[i], keys[i], replace, now_s));
    if (outcomes.back() == Outcome::kStored) stored.push_back(slots[i]);
  }
  // Tail first, so that the blocks of a prefix are younger than what builds on them.
  for (size_t i = stored.size(); i-- != 0;) {
    if (slots_[stored[i]].state == State::kCommitted) orders_.insert(stored[i]);
  }
  return outcomes;
}

Outcome ObjectMap::commit_one(uint32_t at, std::string_view key, bool replace, double now_s) {
  Slot& slot = slots_[at];
  if (slot.partial) prune(at);
  uint32_t before = index_.find(slot.digest);
  if (slot.broken || (before != kNoSlot && !replace)) {
    Outcome outcome = slot.broken ? Outcome::kLost : Outcome::kExists;
    free(at);
    return outcome;
  }
  if (before != kNoSlot) {
    ++counts_.removed;
    hide(before, at);
  }
  book(at, -1);
  slot.state = State::kCommitted;
  book(at, 1);
  index_.insert(at);
  ++counts_.stored;
  if (slot.level == Orders::kSoft) pins_.push({extras_[slot.extra].soft_until_s, {at, slot.version}});
  tell_stored(at, key, now_s);
  mend(at);
  return Outcome::kStored;
}

void ObjectMap::set_sums(std::span<const uint32_t> slots, std::span<const uint64_t> sums) {
  for (size_t i = 0; i < slots.size() && i < sums.size(); ++i) sums_.set(slots[i], sums[i]);
}

void ObjectMap::abandon(std::span<const uint32_t> slots) {
  for (uint32_t at : slots) {
    copy_give_up(at);
    free(at);
  }
}

}  // namespace mooncake::store
