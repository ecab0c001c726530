// How objects come from the ledgers of owners, after their master was lost.
//
// An extent counts on the word of its own segment's owner only: another owner of the same object may not have
// heard yet that it is gone, and its room be another's. A replica counts when all its extents do.
#include <algorithm>
#include <bit>

#include "object_map.hpp"

namespace mooncake::store {

namespace {

constexpr size_t kMostExtents = 64;  // bits of a mask

uint64_t bit(size_t position) { return 1ull << position; }

}  // namespace

bool ObjectMap::adopt(uint64_t segment, std::string_view frames, double now_s, Adoption& adoption) {
  auto number = segments_.find(segment);
  if (!number) return false;
  RecordView record;
  while (!frames.empty()) {
    if (!take_record(frames, record)) return false;
    if (static_cast<RecordKind>(record.head.kind) == RecordKind::kStored) {
      adopt_one(*number, record, now_s, adoption);
    }
  }
  return true;
}

void ObjectMap::adopt_one(uint16_t number, const RecordView& record, double now_s, Adoption& adoption) {
  uint64_t version = record.head.version;
  if (is_adopted(number, record)) return;  // said twice
  uint64_t vouched = take_vouched(number, record);
  next_version_ = std::max(next_version_, version + 1);
  if (vouched == 0) {
    ++adoption.refused;
    tell_refused(segments_[number].owner, record);
    return;
  }
  uint32_t before = index_.find(record.head.digest);
  uint64_t stray = 0;
  vouched |= vouched_before(record, &stray);
  if (stray != 0) {
    Waiting other = waiting_[version];
    std::string_view frame = other.frame;
    RecordView view;
    take_record(frame, view);
    refuse(view, stray);
  }
  bool older = before != kNoSlot && slots_[before].version > version;
  if (older || departed_.has(record.head.digest, tenant(record.tenant), version)) {
    ++adoption.refused;
    refuse(record, vouched);
    waiting_.erase(version);
    return;
  }
  bool same = before != kNoSlot && slots_[before].version == version;
  std::vector<Extent> whole = same ? extents(before) : std::vector<Extent>();
  size_t known = whole.size();
  uint64_t rest = vouched & ~take_whole(record, vouched, whole);
  if (before != kNoSlot && !same && rest != vouched) {
    ++counts_.removed;
    hide(before, kNoSlot);
  }
  uint16_t owner = tenant(record.tenant);
  if (rest == vouched) {
    ++adoption.waiting;
  } else if (!may_adopt(owner, same ? before : kNoSlot, std::span(whole).subspan(known))) {
    ++adoption.refused;
    refuse(record, vouched & ~rest);
  } else if (same) {
    add_replicas(before, std::move(whole));
  } else {
    add_adopted(record, std::move(whole), now_s);
    ++adoption.adopted;
  }
  if (rest == 0) {
    waiting_.erase(version);
  } else {
    waiting_[version] = {std::string(record.frame), rest};
  }
}

bool ObjectMap::is_adopted(uint16_t number, const RecordView& record) const {
  uint64_t waiting = vouched_before(record, nullptr);
  for (size_t i = 0; i < record.extents.size(); ++i) {
    if (record.extents[i].segment == segments_[number].id && (waiting & bit(i)) != 0) return true;
  }
  uint32_t at = index_.find(record.head.digest);
  if (at == kNoSlot || slots_[at].version != record.head.version) return false;
  bool found = false;
  each_extent(slots_[at], [&](const Extent& extent) { found |= extent.segment == number; });
  return found;
}

// Which extents others have vouched for, without making a whole replica, as this record counts them. Owners
// may know another state of the object: replicas come to it and leave it. `refused`: extents not in this one.
uint64_t ObjectMap::vouched_before(const RecordView& record, uint64_t* refused) const {
  auto waiting = waiting_.find(record.head.version);
  if (waiting == waiting_.end()) return 0;
  std::string_view frame = waiting->second.frame;
  RecordView other;
  take_record(frame, other);
  uint64_t found = 0;
  for (size_t k = 0; k < other.extents.size(); ++k) {
    if ((waiting->second.vouched & bit(k)) == 0) continue;
    bool known = false;
    for (size_t i = 0; i < record.extents.size() && i < kMostExtents; ++i) {
      const RecordExtent &here = record.extents[i], &there = other.extents[k];
      bool same = here.segment == there.segment && here.offset == there.offset &&
                  here.nbytes_replica == there.nbytes_replica;
      if (same) known = true, found |= bit(i);
    }
    if (!known && refused != nullptr) *refused |= bit(k);
  }
  return found;
}

// Takes the room that the record names in this segment; 0 when it names none, or not all of it is free.
uint64_t ObjectMap::take_vouched(uint16_t number, const RecordView& record) {
  uint64_t vouched = 0;
  if (record.extents.size() > kMostExtents) return 0;
  for (size_t i = 0; i < record.extents.size(); ++i) {
    const RecordExtent& extent = record.extents[i];
    if (extent.segment != segments_[number].id) continue;
    bool good = extent.nbytes() != 0 && extent.offset % segments_.granule_bytes() == 0;
    if (good && segments_.take_at(extent_of(number, extent))) {
      vouched |= bit(i);
      continue;
    }
    give_back_vouched(record, vouched);
    return 0;
  }
  return vouched;
}

Extent ObjectMap::extent_of(uint16_t number, const RecordExtent& extent) const {
  auto granule = static_cast<uint32_t>(extent.offset / segments_.granule_bytes());
  return {number, extent.replica(), granule, extent.nbytes()};
}

// Appends the extents of replicas that are whole and were not there yet, in order; says which those are.
uint64_t ObjectMap::take_whole(const RecordView& record, uint64_t vouched, std::vector<Extent>& whole) const {
  uint64_t taken = 0;
  for (size_t i = 0; i < record.extents.size();) {
    uint8_t replica = record.extents[i].replica();
    size_t end = i;
    bool all = true;
    for (; end < record.extents.size() && record.extents[end].replica() == replica; ++end) {
      all &= (vouched & bit(end)) != 0;
    }
    for (; i < end; ++i) {
      if (!all) continue;
      whole.push_back(extent_of(*segments_.find(record.extents[i].segment), record.extents[i]));
      taken |= bit(i);
    }
  }
  return taken;
}

void ObjectMap::add_adopted(const RecordView& record, std::vector<Extent> extents, double now_s) {
  uint32_t at = slots_.add();
  Slot& slot = slots_[at];
  slot.digest = record.head.digest;
  slot.version = record.head.version;
  slot.nbytes = record.body.nbytes;
  slot.tenant = tenant(record.tenant);
  slot.priority = record.head.priority;
  slot.state = State::kCommitted;
  double soft_pin_s = record.body.soft_pin_s;
  slot.level = record.head.flags & kPinned ? Orders::kKept : soft_pin_s > 0 ? Orders::kSoft : level_of(slot);
  set_extents(at, std::move(extents));
  if (slot.level == Orders::kSoft) {
    extra(at).soft_until_s = now_s + soft_pin_s;
    pins_.push({now_s + soft_pin_s, {at, slot.version}});
  }
  if (!record.group.empty()) {
    std::string scope = std::to_string(slot.tenant) + ":";
    extra(at).group = groups_.join(scope + std::string(record.group), at);
  }
  uint8_t replicas = static_cast<uint8_t>((record.head.flags >> kReplicasShift) + 1);
  if (replicas > 1) extra(at).replicas = replicas;
  book(at, 1);
  index_.insert(at);
  orders_.insert(at);
  mend(at);
}

// Ledgers may have more than there was: what was evicted, and its owner had not heard of yet. `before`: what
// others of the same value were adopted as.
bool ObjectMap::may_adopt(uint16_t tenant, uint32_t before, std::span<const Extent> coming) {
  uint64_t nbytes = 0;
  for (const Extent& extent : coming) nbytes += segments_.taken(extent.nbytes);
  bool shield = before != kNoSlot && slots_[before].leases == 0;
  if (shield) begin_lease(before);
  bool fits = within_quota(tenant, nbytes);
  if (shield) end_lease(before);
  return fits;
}

// `all`: what the slot has already, and what comes to it.
void ObjectMap::add_replicas(uint32_t at, std::vector<Extent> all) {
  Slot& slot = slots_[at];
  book(at, -1);
  size_t before = extents(at).size();
  // Records of different times may call different replicas by one number.
  for (size_t i = before; i < all.size();) {
    uint8_t number = all[i].replica, unused = 0;
    auto is_used = [&](uint8_t candidate, size_t end) {
      return std::any_of(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(end),
                         [&](const Extent& extent) { return extent.replica == candidate; });
    };
    while (is_used(unused, i)) ++unused;
    bool clashes = is_used(number, i);
    for (; i < all.size() && all[i].replica == number; ++i) {
      if (clashes) all[i].replica = unused;
    }
  }
  for (size_t i = before; i < all.size(); ++i) {
    segments_.hold(all[i]);
    tenants_[slot.tenant].used += segments_.taken(all[i].nbytes);
  }
  slot.segment = kNoSegment;
  extra(at).extents = std::move(all);
  book(at, 1);
}

void ObjectMap::give_back_vouched(const RecordView& record, uint64_t vouched) {
  for (size_t i = 0; i < record.extents.size(); ++i) {
    auto number = vouched & bit(i) ? segments_.find(record.extents[i].segment) : std::nullopt;
    if (number) segments_.give_back(extent_of(*number, record.extents[i]));
  }
}

void ObjectMap::refuse(const RecordView& record, uint64_t vouched) {
  std::vector<uint32_t> told;
  for (size_t i = 0; i < record.extents.size(); ++i) {
    auto number = vouched & bit(i) ? segments_.find(record.extents[i].segment) : std::nullopt;
    if (!number) continue;
    uint32_t owner = segments_[*number].owner;
    if (std::find(told.begin(), told.end(), owner) == told.end()) {
      told.push_back(owner);
      tell_refused(owner, record);
    }
    // Until its owner knows, its ledger names this room, and another master would believe it.
    Extent extent = extent_of(*number, record.extents[i]);
    segments_.hold(extent);
    let_go(extent, true);
  }
}

void ObjectMap::tell_refused(uint32_t owner, const RecordView& record) {
  RecordHead head{static_cast<uint8_t>(RecordKind::kGone),
                  kTell,
                  0,
                  0,
                  sizeof(RecordHead),
                  record.head.version,
                  record.head.digest};
  send(owner, {reinterpret_cast<const char*>(&head), sizeof(head)});
}

void ObjectMap::end_adoption() {
  auto waiting = std::move(waiting_);
  waiting_.clear();
  for (auto& [version, entry] : waiting) {
    std::string_view frame = entry.frame;
    RecordView record;
    if (take_record(frame, record)) refuse(record, entry.vouched);
  }
}

void ObjectMap::forget_waiting(uint64_t segment) {
  for (auto entry = waiting_.begin(); entry != waiting_.end();) {
    std::string_view frame = entry->second.frame;
    RecordView record;
    take_record(frame, record);
    for (size_t i = 0; i < record.extents.size(); ++i) {
      if (record.extents[i].segment == segment) entry->second.vouched &= ~bit(i);
    }
    entry = entry->second.vouched == 0 ? waiting_.erase(entry) : std::next(entry);
  }
}

}  // namespace mooncake::store
