// The access keys of one registered region, at the side that owns it.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <vector>

#include "mooncake_driver.h"
#include "os.hpp"
#include "status.hpp"

namespace mooncake::driver {

using Key = std::array<uint8_t, MC_KEY_BYTES>;

constexpr uint32_t kAllAccess = MC_ACCESS_READ | MC_ACCESS_WRITE;

inline Key key_from(const uint8_t* bytes) {
  Key key;
  std::memcpy(key.data(), bytes, key.size());
  return key;
}

// Not thread-safe: the region's mutex guards it.
class KeyRing {
 public:
  explicit KeyRing(const uint8_t* own) { entries_.push_back({key_from(own), kAllAccess, false}); }

  Status add(const uint8_t* key, uint32_t access) {
    if (access == 0 || (access & ~kAllAccess) != 0)
      return failed(MC_INVALID, "access " + std::to_string(access) + " is not made of mc_access bits");
    entries_.push_back({key_from(key), access, false});
    return {};
  }
  // Null: every key. MC_INVALID for one that was never given.
  Status revoke(const uint8_t* key) {
    bool found = key == nullptr;
    for (Entry& entry : entries_) {
      if (key != nullptr && !equal_in_constant_time(entry.key.data(), key, MC_KEY_BYTES)) continue;
      entry.revoked = true;
      found = true;
    }
    return found ? Status{} : failed(MC_INVALID, "the memory has no such key");
  }
  // The mc_access bits of a peer's key; 0 for a wrong or revoked one. Compares with all, in constant time.
  uint32_t access_of(const uint8_t* key) const {
    uint32_t access = 0;
    for (const Entry& entry : entries_) {
      bool equal = equal_in_constant_time(entry.key.data(), key, MC_KEY_BYTES);
      access |= equal && !entry.revoked ? entry.access : 0u;
    }
    return access;
  }

 private:
  struct Entry {
    Key key;
    uint32_t access;
    bool revoked;
  };
  std::vector<Entry> entries_;
};

}  // namespace mooncake::driver
