#include "region.hpp"

#include <algorithm>
#include <cassert>
#include <chrono>

namespace mooncake_tcp {

namespace {
// Revoked keys are remembered, to say so to those who still use them, but not without end.
constexpr size_t kMaxRevokedKeys = 256;
}  // namespace

bool Region::begin_use() {
  begin(own_uses_);
  if (!closing_.load()) return true;
  end(own_uses_, nullptr);
  return false;
}

Refusal Region::begin_use(Grant& grant, uint32_t access) {
  if ((grant.access & access) != access) return Refusal::kForbidden;
  begin(grant.uses);
  if (!closing_.load() && !grant.revoked.load()) return Refusal::kNone;
  end(grant.uses, &grant);
  return closing_.load() ? Refusal::kClosing : Refusal::kRevoked;
}

void Region::end_use(Grant* grant) { end(grant != nullptr ? grant->uses : own_uses_, grant); }

void Region::end(std::atomic<uint64_t>& uses, const Grant* grant) {
  [[maybe_unused]] uint64_t before = uses.fetch_sub(1);
  assert(before > 0);
  if (!revoked(grant)) return;  // looked at after the count went down, see begin()
  std::lock_guard lock(mutex_);
  unused_.notify_all();
}

bool Region::revoked(const Grant* grant) const {
  return closing_.load() || (grant != nullptr && grant->revoked.load());
}

std::shared_ptr<Grant> Region::find(const Key& key) const {
  std::lock_guard lock(mutex_);
  std::shared_ptr<Grant> found;
  for (const auto& grant : grants_) {
    if (same_key(grant->key, key)) found = grant;
  }
  return found;
}

bool Region::add_key(const Key& key, uint32_t access) {
  if (find(key)) return false;
  std::lock_guard lock(mutex_);
  tidy();
  grants_.push_back(std::make_shared<Grant>(key, access));
  return true;
}

void Region::tidy() {
  size_t revoked = 0;
  for (const auto& grant : grants_) revoked += grant->revoked;
  if (revoked <= kMaxRevokedKeys) return;
  std::erase_if(grants_, [](const auto& grant) { return grant->revoked && grant->uses == 0; });
}

void Region::close() { closing_ = true; }

void Region::revoke_keys() {
  std::lock_guard lock(mutex_);
  for (const auto& grant : grants_) grant->revoked = true;
}

bool Region::revoke_key(const Key& key) {
  auto grant = find(key);
  if (grant) grant->revoked = true;
  return grant != nullptr;
}

uint64_t Region::revoked_uses() const {
  uint64_t uses = closing_ ? own_uses_.load() : 0;
  for (const auto& grant : grants_) uses += closing_ || grant->revoked ? grant->uses.load() : 0;
  return uses;
}

bool Region::wait_unused(uint64_t deadline_ns) {
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC on Linux
  // Beyond this the clock's signed count would wrap into the past.
  constexpr uint64_t kFarthest = uint64_t{1} << 62;
  auto nanoseconds = std::chrono::nanoseconds(deadline_ns < kFarthest ? deadline_ns : kFarthest);
  std::unique_lock lock(mutex_);
  return unused_.wait_until(lock, Clock::time_point(nanoseconds), [this] { return revoked_uses() == 0; });
}

bool RegionTable::add(const std::shared_ptr<Region>& region) {
  std::unique_lock lock(mutex_);
  return regions_.try_emplace(region->id(), region).second;
}

void RegionTable::remove(uint64_t id) {
  std::unique_lock lock(mutex_);
  regions_.erase(id);
}

std::shared_ptr<Region> RegionTable::find(uint64_t id) const {
  std::shared_lock lock(mutex_);
  auto found = regions_.find(id);
  return found == regions_.end() ? nullptr : found->second;
}

Refusal Admission::look_up(const Header& request) {
  region_ = regions_.find(request.region_id);
  if (!region_) return Refusal::kUnknownRegion;
  grant_ = region_->find(request.key);
  return grant_ ? Refusal::kNone : Refusal::kWrongKey;
}

Refusal Admission::admit(const Header& request, uint32_t access, RegionUse* use) {
  bool same = region_ && grant_ && region_->id() == request.region_id && same_key(grant_->key, request.key);
  if (!same || region_->revoked(grant_.get())) {
    Refusal refusal = look_up(request);
    if (refusal != Refusal::kNone) {
      region_.reset();
      grant_.reset();
      return refusal;
    }
  }
  if (!inside(request.remote_offset, request.length, region_->length())) return Refusal::kOutside;
  return RegionUse::of(region_, grant_, access, use);
}

}  // namespace mooncake_tcp
