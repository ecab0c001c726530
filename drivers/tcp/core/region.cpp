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

Refusal Region::begin_use(Claim& claim, uint32_t access) {
  if ((claim.grant->access & access) != access) return Refusal::kForbidden;
  begin(claim.uses);
  if (!closing_.load() && !claim.grant->revoked.load()) return Refusal::kNone;
  end(claim.uses, &claim);
  return closing_.load() ? Refusal::kClosing : Refusal::kRevoked;
}

void Region::end_use(Claim* claim) { end(claim != nullptr ? claim->uses : own_uses_, claim); }

void Region::end(std::atomic<uint64_t>& uses, const Claim* claim) {
  [[maybe_unused]] uint64_t before = uses.fetch_sub(1);
  assert(before > 0);
  if (!revoked(claim)) return;  // looked at after the count went down, see begin()
  std::lock_guard lock(mutex_);
  unused_.notify_all();
}

bool Region::revoked(const Claim* claim) const {
  return closing_.load() || (claim != nullptr && claim->grant->revoked.load());
}

std::shared_ptr<Grant> Region::find(const Key& key) const {
  std::shared_ptr<Grant> found;
  for (const auto& grant : grants_) {
    if (same_key(grant->key, key)) found = grant;
  }
  return found;
}

std::shared_ptr<Claim> Region::claim(const Key& key, const User& user) {
  std::lock_guard lock(mutex_);
  auto grant = find(key);
  if (!grant) return nullptr;
  auto known = claims_.find({user.get(), grant.get()});
  if (known != claims_.end()) return known->second;
  if (claims_.size() >= most_claims_) {
    forget_claims();
    most_claims_ = std::max(kFewestClaims, 2 * claims_.size());
  }
  auto made = std::make_shared<Claim>(grant, user);
  claims_.emplace(ClaimName{user.get(), grant.get()}, made);
  return made;
}

// A copy of the pointer is only made of one that somebody has, or of ours with the mutex held.
void Region::forget_claims() {
  std::erase_if(claims_, [](const auto& item) { return item.second.use_count() == 1; });
}

bool Region::add_key(const Key& key, uint32_t access) {
  std::lock_guard lock(mutex_);
  if (find(key)) return false;
  tidy();
  grants_.push_back(std::make_shared<Grant>(key, access));
  return true;
}

void Region::tidy() {
  size_t revoked = 0;
  for (const auto& grant : grants_) revoked += grant->revoked;
  if (revoked <= kMaxRevokedKeys) return;
  forget_claims();
  std::erase_if(grants_, [](const auto& grant) { return grant->revoked && grant.use_count() == 1; });
}

void Region::close() { closing_ = true; }

void Region::revoke_keys() {
  std::lock_guard lock(mutex_);
  for (const auto& grant : grants_) grant->revoked = true;
}

bool Region::revoke_key(const Key& key) {
  std::lock_guard lock(mutex_);
  auto grant = find(key);
  if (grant) grant->revoked = true;
  return grant != nullptr;
}

uint64_t Region::revoked_uses() const {
  uint64_t uses = closing_ ? own_uses_.load() : 0;
  for (const auto& [name, claim] : claims_) uses += revoked(claim.get()) ? claim->uses.load() : 0;
  return uses;
}

std::string Region::users() const {
  std::lock_guard lock(mutex_);
  uint64_t own = closing_ ? own_uses_.load() : 0;
  uint64_t uses = 0;
  size_t connections = 0;
  const Claim* one = nullptr;
  for (const auto& [name, claim] : claims_) {
    uint64_t of_it = revoked(claim.get()) ? claim->uses.load() : 0;
    if (of_it == 0) continue;
    uses += of_it;
    if (one == nullptr || one->user != claim->user) ++connections;
    one = claim.get();
  }
  std::string text = own == 0 ? "" : std::to_string(own) + " operations of this side";
  if (uses == 0) return text;
  if (own != 0) text += " and ";
  text += std::to_string(uses) + " operations of " + std::to_string(connections) +
          " connections of peers, such as the one from " + *one->user;
  return text;
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
  claim_ = region_->claim(request.key, user_);
  return claim_ ? Refusal::kNone : Refusal::kWrongKey;
}

Refusal Admission::admit(const Header& request, uint32_t access, RegionUse* use) {
  bool same =
      region_ && claim_ && region_->id() == request.region_id && same_key(claim_->grant->key, request.key);
  if (!same || region_->revoked(claim_.get())) {
    Refusal refusal = look_up(request);
    if (refusal != Refusal::kNone) {
      region_.reset();
      claim_.reset();
      return refusal;
    }
  }
  if (!inside(request.remote_offset, request.length, region_->length())) return Refusal::kOutside;
  return RegionUse::of(region_, claim_, access, use);
}

}  // namespace mooncake_tcp
