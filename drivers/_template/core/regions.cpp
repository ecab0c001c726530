#include "regions.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <list>

namespace template_driver {

struct Grant {
  std::array<uint8_t, MC_KEY_BYTES> key{};
  uint32_t access = MC_ACCESS_READ | MC_ACCESS_WRITE;
  int users = 0;
  bool revoked = false;
};

struct Region {
  mc_memory memory;
  std::list<Grant> keys;  // the first is the memory's own
  int users = 0;
  bool revoked = false;
};

namespace {

bool inside(uint64_t offset, uint64_t length, const Region& region) {
  return offset <= region.memory.length && length <= region.memory.length - offset;
}

// Takes the same time wherever the first wrong byte is, so that keys cannot be guessed byte by byte.
bool same_key(const Grant& grant, const uint8_t* right) {
  const uint8_t* left = grant.key.data();
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < MC_KEY_BYTES; ++i)
    difference = static_cast<uint8_t>(difference | (left[i] ^ right[i]));
  return difference == 0;
}

Grant* find_key(Region& region, const uint8_t* key) {
  Grant* found = nullptr;
  for (Grant& grant : region.keys) {
    if (same_key(grant, key)) found = &grant;
  }
  return found;
}

Grant make_grant(const uint8_t* key, uint32_t access) {
  Grant grant;
  std::memcpy(grant.key.data(), key, grant.key.size());
  grant.access = access;
  return grant;
}

// The steady clock of C++ is CLOCK_MONOTONIC on Linux.
std::chrono::steady_clock::time_point to_time(uint64_t deadline_ns) {
  return std::chrono::steady_clock::time_point{std::chrono::nanoseconds(deadline_ns)};
}

}  // namespace

mc_handle new_handle() {
  static std::atomic<mc_handle> next{1};
  return next++;
}

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

Status Regions::add(const mc_memory& memory, mc_handle* handle) {
  if (memory.kind != MC_DRAM) return {MC_UNSUPPORTED, "the template driver moves main memory only"};
  if (memory.address == 0 || memory.length == 0) return {MC_INVALID, "the memory is empty"};
  std::lock_guard lock(mutex_);
  *handle = new_handle();
  auto region = std::make_shared<Region>(Region{memory, {}});
  region->keys.push_back(make_grant(memory.key, MC_ACCESS_READ | MC_ACCESS_WRITE));
  by_handle_[*handle] = std::move(region);
  return {};
}

Status Regions::remove(mc_handle handle, uint64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) return {MC_INVALID, "no memory is registered under this handle"};
  std::shared_ptr<Region> region = found->second;
  region->revoked = true;  // from here on no one begins to use it
  if (!unused_.wait_until(lock, to_time(deadline_ns), [&] { return region->users == 0; })) {
    return {MC_TIMEOUT, "operations on the region were still in flight at the deadline"};
  }
  by_handle_.erase(handle);
  return {};
}

bool Regions::has(mc_handle handle) {
  std::lock_guard lock(mutex_);
  return by_handle_.contains(handle);
}

Status Regions::grant(mc_handle handle, const uint8_t* key, uint32_t access) {
  if (access == 0 || (access & ~(MC_ACCESS_READ | MC_ACCESS_WRITE)) != 0)
    return {MC_INVALID, "a key must allow reading, writing or both"};
  std::lock_guard lock(mutex_);
  auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) return {MC_INVALID, "no memory is registered under this handle"};
  if (find_key(*found->second, key) != nullptr) return {MC_INVALID, "the region has this key already"};
  found->second->keys.push_back(make_grant(key, access));
  return {};
}

Status Regions::revoke(mc_handle handle, const uint8_t* key, uint64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) return {MC_INVALID, "no memory is registered under this handle"};
  std::shared_ptr<Region> region = found->second;
  Grant* one = key == nullptr ? nullptr : find_key(*region, key);
  if (key != nullptr && one == nullptr) return {MC_INVALID, "the region never had this key"};
  auto meant = [&](const Grant& grant) { return one == nullptr || one == &grant; };
  for (Grant& grant : region->keys) grant.revoked |= meant(grant);
  if (deadline_ns == 0) return {};
  bool idle = unused_.wait_until(lock, to_time(deadline_ns), [&] {
    return std::none_of(region->keys.begin(), region->keys.end(),
                        [&](const Grant& grant) { return meant(grant) && grant.revoked && grant.users > 0; });
  });
  if (!idle) return {MC_TIMEOUT, "operations under the key were still in flight at the deadline"};
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

Regions::Use Regions::use(mc_handle handle, uint64_t offset, uint64_t length, Status* status) {
  std::lock_guard lock(mutex_);
  auto found = by_handle_.find(handle);
  if (found == by_handle_.end() || found->second->revoked || !inside(offset, length, *found->second)) {
    *status = {MC_INVALID, "the local memory is not registered, or the range is outside of it"};
    return {};
  }
  return begin(found->second, nullptr);
}

Regions::Use Regions::admit(const Request& request, Status* status) {
  std::lock_guard lock(mutex_);
  for (const auto& [handle, region] : by_handle_) {
    if (region->memory.region_id != request.region_id || region->revoked) continue;
    Grant* key = find_key(*region, request.key);
    uint32_t wanted = request.opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
    if (key == nullptr) {
      *status = {MC_REFUSED, "wrong access key"};
    } else if (key->revoked) {
      *status = {MC_REFUSED, "the access key was revoked"};
    } else if ((key->access & wanted) == 0) {
      *status = {MC_REFUSED,
                 wanted == MC_ACCESS_READ ? "the key allows only writing" : "the key allows only reading"};
    } else if (!inside(request.offset, request.length, *region)) {
      *status = {MC_REFUSED, "the range is outside the region"};
    } else {
      return begin(region, key);
    }
    return {};
  }
  *status = {MC_REFUSED, "the region is not registered at the target"};
  return {};
}

}  // namespace template_driver
