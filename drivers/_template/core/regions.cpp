#include "regions.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <list>
#include <string>

#include "support/keys.hpp"
#include "support/memory.hpp"
#include "support/os.hpp"

namespace template_driver {

using mooncake::driver::kAllAccess;
using mooncake::driver::key_from;
using mooncake::driver::time_point;

struct Grant {
  mooncake::driver::Key key;
  uint32_t access;  // mc_access bits
  int users = 0;
  bool revoked = false;
};

// Guarded by the mutex of Regions, but for `memory`, which does not change.
struct Region {
  mc_memory memory;
  std::list<Grant> keys;  // the first is the memory's own
  int users = 0;
  bool revoked = false;
};

namespace {

// No sum is formed, so nothing can wrap.
bool inside(uint64_t offset, uint64_t length, const Region& region) {
  return offset <= region.memory.length && length <= region.memory.length - offset;
}

Grant* find_key(Region& region, const uint8_t* key) {
  Grant* found = nullptr;
  for (Grant& grant : region.keys) {
    // In constant time, so that keys cannot be guessed byte by byte.
    if (mooncake::driver::equal_in_constant_time(grant.key.data(), key, MC_KEY_BYTES)) found = &grant;
  }
  return found;
}

}  // namespace

Regions::Use::~Use() {
  if (!region_) return;
  std::lock_guard lock(regions_->mutex_);
  --region_->users;
  if (key_ != nullptr) --key_->users;
  regions_->unused_.notify_all();
}

char* Regions::Use::at(uint64_t offset) const {
  return reinterpret_cast<char*>(region_->memory.address) + offset;
}

Status Regions::add(const mc_memory& memory, std::shared_ptr<Region>* region) {
  Status known =
      mooncake::driver::check_memory(memory, 1u << MC_DRAM, "the template driver moves main memory only");
  if (!known.ok()) return known;
  auto made = std::make_shared<Region>();
  std::memcpy(&made->memory, &memory, std::min<size_t>(memory.struct_size, sizeof memory));
  made->keys.push_back({key_from(memory.key), kAllAccess});
  std::lock_guard lock(mutex_);
  if (!by_id_.emplace(memory.region_id, made).second)
    return failed(MC_INVALID, "region id " + std::to_string(memory.region_id) + " is registered already");
  *region = std::move(made);
  return {};
}

Status Regions::remove(const std::shared_ptr<Region>& region, uint64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  region->revoked = true;  // from here on no one begins to use it
  if (!unused_.wait_until(lock, time_point(deadline_ns), [&] { return region->users == 0; }))
    return failed(MC_TIMEOUT, "operations on the region were still in flight at the deadline");
  by_id_.erase(region->memory.region_id);
  return {};
}

Status Regions::grant(Region& region, const uint8_t* key, uint32_t access) {
  if (access == 0 || (access & ~kAllAccess) != 0)
    return failed(MC_INVALID, "access " + std::to_string(access) + " is not made of mc_access bits");
  std::lock_guard lock(mutex_);
  if (find_key(region, key) != nullptr) return failed(MC_INVALID, "the region has this key already");
  region.keys.push_back({key_from(key), access});
  return {};
}

Status Regions::revoke(Region& region, const uint8_t* key, uint64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  Grant* one = key == nullptr ? nullptr : find_key(region, key);
  if (key != nullptr && one == nullptr) return failed(MC_INVALID, "the region never had this key");
  auto meant = [&](const Grant& grant) { return one == nullptr || one == &grant; };
  for (Grant& grant : region.keys) grant.revoked |= meant(grant);
  if (deadline_ns == 0) return {};
  bool idle = unused_.wait_until(lock, time_point(deadline_ns), [&] {
    return std::none_of(region.keys.begin(), region.keys.end(),
                        [&](const Grant& grant) { return meant(grant) && grant.revoked && grant.users > 0; });
  });
  if (!idle) return failed(MC_TIMEOUT, "operations under the key were still in flight at the deadline");
  return {};
}

Regions::Use Regions::begin(const std::shared_ptr<Region>& region, Grant* key) {
  Use use;
  use.key_ = key;
  if (key != nullptr) ++key->users;
  use.regions_ = this;
  use.region_ = region;
  ++region->users;
  return use;
}

Status Regions::use(const std::shared_ptr<Region>& region, uint64_t offset, uint64_t length, Use* use) {
  std::lock_guard lock(mutex_);
  if (region->revoked) return failed(MC_INVALID, "the local memory is being given back");
  if (!inside(offset, length, *region)) return failed(MC_INVALID, "the range is outside the local memory");
  *use = begin(region, nullptr);
  return {};
}

Status Regions::admit(const Request& request, Use* use) {
  uint32_t wanted = request.opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
  std::lock_guard lock(mutex_);
  auto found = by_id_.find(request.region_id);
  if (found == by_id_.end() || found->second->revoked)
    return failed(MC_REFUSED, "the region is not registered at the target");
  Grant* key = find_key(*found->second, request.key);
  if (key == nullptr) return failed(MC_REFUSED, "wrong access key");
  if (key->revoked) return failed(MC_REFUSED, "the access key was revoked");
  if ((key->access & wanted) == 0)
    return failed(MC_REFUSED,
                  "the key allows only " + std::string(wanted == MC_ACCESS_READ ? "writing" : "reading"));
  if (!inside(request.offset, request.length, *found->second))
    return failed(MC_REFUSED, "the range is outside the region");
  *use = begin(found->second, key);
  return {};
}

}  // namespace template_driver
