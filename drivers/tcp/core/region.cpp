#include "region.hpp"

#include <cassert>
#include <chrono>

namespace mooncake_tcp {

bool Region::begin_use() {
  std::lock_guard lock(mutex_);
  if (revoked_) return false;
  ++uses_;
  return true;
}

void Region::end_use() {
  std::lock_guard lock(mutex_);
  assert(uses_ > 0);
  if (--uses_ == 0 && revoked_) unused_.notify_all();
}

void Region::revoke() {
  std::lock_guard lock(mutex_);
  revoked_ = true;
}

bool Region::revoked() const {
  std::lock_guard lock(mutex_);
  return revoked_;
}

bool Region::wait_unused(uint64_t deadline_ns) {
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC on Linux
  // Beyond this the clock's signed count would wrap into the past.
  constexpr uint64_t kFarthest = uint64_t{1} << 62;
  auto nanoseconds = std::chrono::nanoseconds(deadline_ns < kFarthest ? deadline_ns : kFarthest);
  std::unique_lock lock(mutex_);
  return unused_.wait_until(lock, Clock::time_point(nanoseconds), [this] { return uses_ == 0; });
}

bool RegionTable::add(const std::shared_ptr<Region>& region) {
  std::unique_lock lock(mutex_);
  return regions_.try_emplace(region->id(), region).second;
}

void RegionTable::remove(uint64_t id) {
  std::unique_lock lock(mutex_);
  regions_.erase(id);
}

Refusal RegionTable::admit(const Header& request, RegionUse* use) const {
  std::shared_ptr<Region> region;
  {
    std::shared_lock lock(mutex_);
    auto found = regions_.find(request.region_id);
    if (found == regions_.end()) return Refusal::kUnknownRegion;
    region = found->second;
  }
  if (!same_key(region->key(), request.key)) return Refusal::kWrongKey;
  if (!inside(request.remote_offset, request.length, region->length())) return Refusal::kOutside;
  *use = RegionUse::of(std::move(region));
  return *use ? Refusal::kNone : Refusal::kClosing;
}

}  // namespace mooncake_tcp
