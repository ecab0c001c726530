// What objects are told apart by: pins, sessions, tenants; and who is told of them.
#include <algorithm>

#include "object_map.hpp"

namespace mooncake::store {

namespace {

std::string_view as_frame(const RecordHead& head) {
  return {reinterpret_cast<const char*>(&head), sizeof(head)};
}

}  // namespace

std::vector<uint8_t> ObjectMap::pin(std::span<const Digest> digests, bool hard, double soft_until_s,
                                    double now_s) {
  expire_pins(now_s);
  std::vector<uint8_t> there;
  for (uint32_t at : find(digests)) {
    there.push_back(at != kNoSlot);
    if (at == kNoSlot) continue;
    if (hard) {
      set_level(at, Orders::kKept);
      continue;
    }
    Extra& more = extra(at);
    if (soft_until_s > more.soft_until_s) {
      more.soft_until_s = soft_until_s;
      pins_.push({soft_until_s, {at, slots_[at].version}});
    }
    if (slots_[at].level != Orders::kKept) set_level(at, Orders::kSoft);
  }
  return there;
}

std::vector<uint8_t> ObjectMap::unpin(std::span<const Digest> digests) {
  std::vector<uint8_t> there;
  for (uint32_t at : find(digests)) {
    there.push_back(at != kNoSlot);
    if (at == kNoSlot || slots_[at].level < Orders::kSoft) continue;
    if (slots_[at].extra != 0) extras_[slots_[at].extra].soft_until_s = 0;
    set_level(at, level_of(slots_[at]));
  }
  return there;
}

void ObjectMap::expire_pins(double now_s) {
  while (!pins_.empty() && pins_.top().until_s <= now_s) {
    Ref ref = pins_.top().ref;
    pins_.pop();
    if (!is_current(slots_, ref) || slots_[ref.at].level != Orders::kSoft) continue;
    if (slots_[ref.at].state != State::kCommitted || extras_[slots_[ref.at].extra].soft_until_s > now_s) {
      continue;
    }
    set_level(ref.at, level_of(slots_[ref.at]));
  }
}

uint64_t ObjectMap::end_session(uint16_t tenant, std::string_view session) {
  uint32_t number = sessions_.find(std::to_string(tenant) + ":" + std::string(session));
  uint64_t ended = 0;
  if (number == 0) return ended;
  for (uint32_t at : sessions_.members(number)) {
    if (slots_[at].state == State::kHidden || slots_[at].level >= Orders::kSoft) continue;
    set_level(at, Orders::kEnded);
    ++ended;
  }
  return ended;
}

void ObjectMap::set_level(uint32_t at, uint32_t level) {
  Slot& slot = slots_[at];
  if (slot.level == level) return;
  if (slot.state != State::kCommitted) {
    slot.level = level;
    return;
  }
  orders_.remove(at);
  book(at, -1);
  slot.level = level;
  book(at, 1);
  orders_.insert(at);
  tell_changed(at);
}

uint16_t ObjectMap::tenant(std::string_view name) {
  constexpr size_t kMost = 65535;
  auto found = tenant_numbers_.find(std::string(name));
  if (found != tenant_numbers_.end()) return found->second;
  if (tenants_.size() == kMost) return kMost - 1;
  auto number = static_cast<uint16_t>(tenants_.size());
  tenants_.push_back({.name = std::string(name)});
  tenant_numbers_.emplace(name, number);
  return number;
}

void ObjectMap::limit_tenant(uint16_t tenant, uint64_t quota_bytes, bool evicts_own) {
  tenants_[tenant].quota = quota_bytes;
  tenants_[tenant].evicts_own = evicts_own;
}

RecordStream* ObjectMap::stream(uint32_t member) {
  auto found = streams_.find(member);
  return found == streams_.end() ? nullptr : &found->second;
}

void ObjectMap::send(uint32_t member, std::string_view frame) {
  RecordStream* found = stream(member);
  if (found != nullptr && found->append(frame)) to_ring_.push_back(member);
}

std::vector<uint32_t> ObjectMap::take_rings() {
  std::vector<uint32_t> ringing;
  for (uint32_t member : to_ring_) {
    RecordStream* found = stream(member);
    if (found != nullptr && found->ring()) ringing.push_back(member);
  }
  to_ring_.clear();
  return ringing;
}

std::vector<uint32_t> ObjectMap::concerned(uint32_t at, bool owners_only) const {
  std::vector<uint32_t> members;
  auto add = [&](uint32_t member) {
    if (std::find(members.begin(), members.end(), member) == members.end()) members.push_back(member);
  };
  each_extent(slots_[at], [&](const Extent& extent) {
    if (segments_[extent.segment].there) add(segments_[extent.segment].owner);
  });
  if (!owners_only) add(slots_[at].writer);
  return members;
}

uint8_t ObjectMap::flags_of(uint32_t at) const {
  auto flags = static_cast<uint8_t>((wanted_replicas(at) - 1) << kReplicasShift);
  return slots_[at].level == Orders::kKept ? static_cast<uint8_t>(flags | kPinned) : flags;
}

void ObjectMap::tell_stored(uint32_t at, std::string_view key, double now_s) {
  const Slot& slot = slots_[at];
  std::vector<RecordExtent>& all = record_extents_;
  all.clear();
  // A replica of which a part was lost is none for the next master.
  std::vector<Extent> whole;
  if (slot.partial) whole = extents(at);
  each_extent(slot, [&](const Extent& extent) {
    if (slot.partial && !is_whole(whole, extent.replica)) return;
    all.push_back({segments_[extent.segment].id, extent.granule * segments_.granule_bytes(),
                   extent.nbytes | static_cast<uint64_t>(extent.replica) << 56});
  });
  if (all.empty()) return;
  const Extra* more = slot.extra == 0 ? nullptr : &extras_[slot.extra];
  std::string_view group =
      more == nullptr || more->group == 0 ? std::string_view() : groups_.name(more->group);
  group.remove_prefix(std::min(group.size(), group.find(':') + 1));
  std::string_view tenant = tenants_[slot.tenant].name;
  RecordHead head{static_cast<uint8_t>(RecordKind::kStored),
                  flags_of(at),
                  static_cast<uint8_t>(slot.priority),
                  static_cast<uint8_t>(all.size()),
                  0,
                  slot.version,
                  slot.digest};
  RecordBody body{slot.nbytes, slot.level == Orders::kSoft ? more->soft_until_s - now_s : 0.0,
                  static_cast<uint16_t>(tenant.size()), static_cast<uint16_t>(group.size()),
                  static_cast<uint32_t>(key.size())};
  make_stored(record_frame_, head, body, all.data(), tenant, group, key);
  if (slot.segment != kNoSegment) {  // one extent, as of most
    send(segments_[static_cast<uint16_t>(slot.segment)].owner, record_frame_);
    return;
  }
  for (uint32_t member : concerned(at, true)) send(member, record_frame_);
}

void ObjectMap::tell_gone(uint32_t at, uint32_t successor) {
  const Slot& slot = slots_[at];
  std::vector<uint32_t> owners = concerned(at, true);
  // Whoever has nothing to do with the new version has lost the key.
  std::vector<uint32_t> keep;
  if (successor != kNoSlot) keep = concerned(successor, false);
  for (uint32_t member : concerned(at, false)) {
    bool tell = std::find(keep.begin(), keep.end(), member) == keep.end();
    bool owns = std::find(owners.begin(), owners.end(), member) != owners.end();
    if (!tell && !owns) continue;
    RecordHead head{static_cast<uint8_t>(RecordKind::kGone),
                    tell ? kTell : uint8_t{0},
                    0,
                    0,
                    sizeof(RecordHead),
                    slot.version,
                    slot.digest};
    send(member, as_frame(head));
  }
}

void ObjectMap::tell_changed(uint32_t at) {
  const Slot& slot = slots_[at];
  RecordHead head{static_cast<uint8_t>(RecordKind::kChanged),
                  flags_of(at),
                  static_cast<uint8_t>(slot.priority),
                  0,
                  sizeof(RecordHead),
                  slot.version,
                  slot.digest};
  for (uint32_t member : concerned(at, true)) {
    send(member, as_frame(head));
  }
}

}  // namespace mooncake::store
