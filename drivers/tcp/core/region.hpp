// Registered memory: what peers may touch, and what operations of this side move from and to.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "status.hpp"
#include "wire.hpp"

namespace mooncake_tcp {

// Whether [offset, offset + length) lies in a range of `size` bytes; no sum is formed, so nothing can wrap.
inline bool inside(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

// A key by which peers may reach a region, and what it allows.
struct Grant {
  Grant(const Key& key, uint32_t access) : key(key), access(access) {}

  const Key key;
  const uint32_t access;  // mc_access bits
  std::atomic<bool> revoked{false};
};

// Who is at the other end of a connection, as messages call it. Each connection has an object of its own.
using User = std::shared_ptr<const std::string>;

// A grant in the hands of one connection. Its uses are counted apart, so that who is still in the memory can
// be named.
struct Claim {
  Claim(std::shared_ptr<Grant> grant, User user) : grant(std::move(grant)), user(std::move(user)) {}

  const std::shared_ptr<Grant> grant;
  const User user;
  std::atomic<uint64_t> uses{0};
};

class Region {
 public:
  Region(uint64_t id, uint64_t address, uint64_t length, const Key& key)
      : id_(id), base_(reinterpret_cast<std::byte*>(address)), length_(length) {
    grants_.push_back(std::make_shared<Grant>(key, MC_ACCESS_READ | MC_ACCESS_WRITE));
  }

  uint64_t id() const { return id_; }
  uint64_t length() const { return length_; }
  std::byte* at(uint64_t offset) const { return base_ + offset; }

  // Every use that began must end. By this side: false once the region is being deregistered.
  bool begin_use();
  // By a peer, with a claim on this region. Otherwise the reason why it may not.
  Refusal begin_use(Claim& claim, uint32_t access);
  void end_use(Claim* claim);
  // `claim` is null for a use by this side.
  bool revoked(const Claim* claim) const;

  // What a key opens for a connection; nullptr: nothing.
  std::shared_ptr<Claim> claim(const Key& key, const User& user);
  // Makes one more key; false when there is an equal one.
  bool add_key(const Key& key, uint32_t access);
  // All refuse new uses at once: of both sides, of peers, of peers with this key (false: there is none).
  void close();
  void revoke_keys();
  bool revoke_key(const Key& key);
  // True when the last use of what was revoked has ended by the deadline.
  bool wait_unused(uint64_t deadline_ns);
  // What of that has not ended: how many, and whose one is. Empty: nothing.
  std::string users() const;

 private:
  using ClaimName = std::pair<const std::string*, const Grant*>;  // user and grant

  // With the mutex held.
  std::shared_ptr<Grant> find(const Key& key) const;
  void forget_claims();
  void tidy();
  uint64_t revoked_uses() const;

  const uint64_t id_;
  std::byte* const base_;
  const uint64_t length_;
  // A use is counted before the flags are looked at, and who sets a flag looks at the count after that. So
  // one of the two sees the other, and the same holds at the end of a use.
  void begin(std::atomic<uint64_t>& uses) { uses.fetch_add(1); }
  void end(std::atomic<uint64_t>& uses, const Claim* claim);

  std::atomic<uint64_t> own_uses_{0};
  std::atomic<bool> closing_{false};
  mutable std::mutex mutex_;
  std::condition_variable unused_;
  std::vector<std::shared_ptr<Grant>> grants_;  // the first is the region's own key
  std::map<ClaimName, std::shared_ptr<Claim>> claims_;
  static constexpr size_t kFewestClaims = 16;
  size_t most_claims_ = kFewestClaims;  // those that nobody holds are forgotten when there are more
};

// One use of a region; while it lives the memory stays registered.
class RegionUse {
 public:
  RegionUse() = default;
  ~RegionUse() { release(); }
  RegionUse(RegionUse&& other) noexcept
      : region_(std::move(other.region_)), claim_(std::move(other.claim_)) {}
  RegionUse& operator=(RegionUse&& other) noexcept {
    if (this != &other) {
      release();
      region_ = std::move(other.region_);
      claim_ = std::move(other.claim_);
    }
    return *this;
  }

  // Of this side; empty when the region is being deregistered.
  static RegionUse of(std::shared_ptr<Region> region) {
    RegionUse use;
    if (region && region->begin_use()) use.region_ = std::move(region);
    return use;
  }
  // Of a peer; unchanged when it may not.
  static Refusal of(const std::shared_ptr<Region>& region, const std::shared_ptr<Claim>& claim,
                    uint32_t access, RegionUse* use) {
    Refusal refusal = region->begin_use(*claim, access);
    if (refusal != Refusal::kNone) return refusal;
    use->release();
    use->region_ = region;
    use->claim_ = claim;
    return Refusal::kNone;
  }

  explicit operator bool() const { return region_ != nullptr; }
  Region* operator->() const { return region_.get(); }
  const Region* get() const { return region_.get(); }
  bool revoked() const { return region_ != nullptr && region_->revoked(claim_.get()); }
  void release() {
    if (!region_) return;
    region_->end_use(claim_.get());
    region_.reset();
    claim_.reset();
  }

 private:
  std::shared_ptr<Region> region_;
  std::shared_ptr<Claim> claim_;
};

// The regions peers may address, by the id that travels in descriptors.
class RegionTable {
 public:
  // False when the id is taken.
  bool add(const std::shared_ptr<Region>& region);
  void remove(uint64_t id);
  std::shared_ptr<Region> find(uint64_t id) const;

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> regions_;
};

// Decides about the requests of one connection, and remembers what the last one was about: the next is mostly
// about the same.
class Admission {
 public:
  explicit Admission(const RegionTable& regions) : regions_(regions) {}
  // Who asks, before the first request.
  void set_user(std::string user) { user_ = std::make_shared<const std::string>(std::move(user)); }
  // A use of the region for a request that needs `access`, or why there is none.
  Refusal admit(const Header& request, uint32_t access, RegionUse* use);

 private:
  Refusal look_up(const Header& request);

  const RegionTable& regions_;
  User user_ = std::make_shared<const std::string>("an unknown address");
  std::shared_ptr<Region> region_;
  std::shared_ptr<Claim> claim_;
};

}  // namespace mooncake_tcp
