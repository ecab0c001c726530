// What has left a master's map while ledgers may still bring it, or an older version of it, again.
#pragma once

#include <algorithm>
#include <cstdint>
#include <unordered_map>

#include "digest_index.hpp"

namespace mooncake::store {

// Nothing is kept before await(), and after end(). More than kMost keys become one bound for all of them,
// which costs values and is never wrong.
class Departed {
 public:
  void await() { awaits_ = true; }
  void end() { *this = Departed(); }

  // No version of the key up to this one is to come again.
  void note(const Digest& digest, uint64_t version) {
    if (!awaits_) return;
    if (keys_.size() >= kMost) {
      for (const auto& [key, newest] : keys_) all_ = std::max(all_, newest);
      keys_.clear();
    }
    uint64_t& newest = keys_[digest];
    newest = std::max(newest, version);
  }
  // The same for all keys of a tenant.
  void note_tenant(uint16_t tenant, uint64_t version) {
    if (awaits_) tenants_[tenant] = std::max(tenants_[tenant], version);
  }
  bool has(const Digest& digest, uint16_t tenant, uint64_t version) const {
    if (!awaits_) return false;
    if (version <= all_) return true;
    auto key = keys_.find(digest);
    if (key != keys_.end() && version <= key->second) return true;
    auto whose = tenants_.find(tenant);
    return whose != tenants_.end() && version <= whose->second;
  }

 private:
  static constexpr size_t kMost = 1 << 20;
  struct Hash {
    size_t operator()(const Digest& digest) const { return digest.low; }
  };

  bool awaits_ = false;
  uint64_t all_ = 0;
  std::unordered_map<Digest, uint64_t, Hash> keys_;
  std::unordered_map<uint16_t, uint64_t> tenants_;
};

}  // namespace mooncake::store
