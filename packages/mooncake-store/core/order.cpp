#include "order.hpp"

namespace mooncake::store {

void Orders::insert(uint32_t at) {
  Slot& slot = slots_[at];
  slot.uses = 0;
  if (slot.level >= kLevels) return;
  if (kind_ != Kind::kForeign) {
    link(at);
    return;
  }
  Queue& own = queue(at);
  if (own.foreign == nullptr) own.foreign = make_();
  own.foreign->insert(slot.version, slot.digest.low, slot.nbytes);
  by_version_[slot.version] = at;
  ++sizes_[slot.level];
  slot.linked = 1;
  slot.stamp = ++stamp_;
  if (slot.leases != 0) own.foreign->pin(slot.version);
}

void Orders::touch(uint32_t at) {
  Slot& slot = slots_[at];
  if (slot.level >= kLevels) return;
  if (kind_ == Kind::kClock) {
    if (slot.uses < 3) ++slot.uses;
  } else if (kind_ == Kind::kForeign) {
    queue(at).foreign->touch(slot.version);
    slot.stamp = ++stamp_;
  } else if (slot.linked) {
    unlink(at);
    link(at);
  }
}

void Orders::pin(uint32_t at) {
  if (kind_ == Kind::kForeign && slots_[at].level < kLevels) queue(at).foreign->pin(slots_[at].version);
}

void Orders::unpin(uint32_t at) {
  if (slots_[at].level >= kLevels) return;
  if (kind_ == Kind::kForeign) {
    queue(at).foreign->unpin(slots_[at].version);
  } else if (!slots_[at].linked) {
    link(at);
  }
}

void Orders::remove(uint32_t at) {
  Slot& slot = slots_[at];
  if (!slot.linked) return;
  if (kind_ != Kind::kForeign) {
    unlink(at);
    return;
  }
  queue(at).foreign->remove(slot.version);
  by_version_.erase(slot.version);
  --sizes_[slot.level];
  slot.linked = 0;
}

uint32_t Orders::victim(std::optional<uint16_t> tenant) {
  for (uint32_t level = 0; level < kLevels; ++level) {
    uint32_t at;
    while (sizes_[level] != 0 && (at = oldest_of(level, tenant)) != kNoSlot) {
      Slot& slot = slots_[at];
      if (kind_ == Kind::kForeign) return at;
      if (slot.leases != 0) {
        unlink(at);
      } else if (slot.uses != 0) {
        --slot.uses;
        unlink(at);
        link(at);
      } else {
        return at;
      }
    }
  }
  return kNoSlot;
}

Orders::Queue& Orders::queue(uint32_t at) {
  uint16_t tenant = slots_[at].tenant;
  while (tenants_.size() <= tenant) tenants_.push_back(nullptr);
  if (tenants_[tenant] == nullptr) tenants_[tenant] = std::make_unique<Queues>();
  return (*tenants_[tenant])[slots_[at].level];
}

void Orders::link(uint32_t at) {
  Slot& slot = slots_[at];
  Queue& own = queue(at);
  slot.older = own.youngest;
  slot.younger = kNoSlot;
  (own.youngest == kNoSlot ? own.oldest : slots_[own.youngest].younger) = at;
  own.youngest = at;
  slot.stamp = ++stamp_;
  slot.linked = 1;
  ++sizes_[slot.level];
}

void Orders::unlink(uint32_t at) {
  Slot& slot = slots_[at];
  Queue& own = queue(at);
  (slot.older == kNoSlot ? own.oldest : slots_[slot.older].younger) = slot.younger;
  (slot.younger == kNoSlot ? own.youngest : slots_[slot.younger].older) = slot.older;
  slot.linked = 0;
  --sizes_[slot.level];
}

uint32_t Orders::head(Queue& queue) {
  if (queue.foreign == nullptr) return queue.oldest;
  auto id = queue.foreign->victim();
  auto found = id ? by_version_.find(*id) : by_version_.end();
  return found == by_version_.end() ? kNoSlot : found->second;
}

uint32_t Orders::oldest_of(uint32_t level, std::optional<uint16_t> tenant) {
  if (tenant) {
    bool known = *tenant < tenants_.size() && tenants_[*tenant] != nullptr;
    return known ? head((*tenants_[*tenant])[level]) : kNoSlot;
  }
  uint32_t oldest = kNoSlot;
  for (auto& queues : tenants_) {
    uint32_t at = queues == nullptr ? kNoSlot : head((*queues)[level]);
    if (at == kNoSlot) continue;
    if (oldest == kNoSlot || static_cast<int32_t>(slots_[at].stamp - slots_[oldest].stamp) < 0) oldest = at;
  }
  return oldest;
}

}  // namespace mooncake::store
