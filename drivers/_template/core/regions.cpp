#include "regions.hpp"

#include <atomic>
#include <chrono>
#include <cstddef>

namespace template_driver {

struct Region {
  mc_memory memory;
  int users = 0;
  bool revoked = false;
};

namespace {

bool inside(uint64_t offset, uint64_t length, const Region& region) {
  return offset <= region.memory.length && length <= region.memory.length - offset;
}

// Takes the same time wherever the first wrong byte is, so that keys cannot be guessed byte by byte.
bool same_key(const uint8_t* left, const uint8_t* right) {
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < MC_KEY_BYTES; ++i)
    difference = static_cast<uint8_t>(difference | (left[i] ^ right[i]));
  return difference == 0;
}

}  // namespace

mc_handle new_handle() {
  static std::atomic<mc_handle> next{1};
  return next++;
}

Regions::Use::~Use() {
  if (!region_) return;
  std::lock_guard lock(regions_->mutex_);
  if (--region_->users == 0) regions_->unused_.notify_all();
}

char* Regions::Use::at(uint64_t offset) const {
  return reinterpret_cast<char*>(region_->memory.address) + offset;
}

Status Regions::add(const mc_memory& memory, mc_handle* handle) {
  if (memory.kind != MC_DRAM) return {MC_UNSUPPORTED, "the template driver moves main memory only"};
  if (memory.address == 0 || memory.length == 0) return {MC_INVALID, "the memory is empty"};
  std::lock_guard lock(mutex_);
  *handle = new_handle();
  by_handle_[*handle] = std::make_shared<Region>(Region{memory});
  return {};
}

Status Regions::remove(mc_handle handle, uint64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  auto found = by_handle_.find(handle);
  if (found == by_handle_.end()) return {MC_INVALID, "no memory is registered under this handle"};
  std::shared_ptr<Region> region = found->second;
  region->revoked = true;  // from here on no one begins to use it
  // The steady clock of C++ is CLOCK_MONOTONIC on Linux.
  std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  if (!unused_.wait_until(lock, deadline, [&] { return region->users == 0; })) {
    return {MC_TIMEOUT, "operations on the region were still in flight at the deadline"};
  }
  by_handle_.erase(handle);
  return {};
}

bool Regions::has(mc_handle handle) {
  std::lock_guard lock(mutex_);
  return by_handle_.contains(handle);
}

Regions::Use Regions::begin(const std::shared_ptr<Region>& region) {
  Use use;
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
  return begin(found->second);
}

Regions::Use Regions::admit(const Request& request, Status* status) {
  std::lock_guard lock(mutex_);
  for (const auto& [handle, region] : by_handle_) {
    if (region->memory.region_id != request.region_id || region->revoked) continue;
    if (!same_key(region->memory.key, request.key)) {
      *status = {MC_REFUSED, "wrong access key"};
      return {};
    }
    if (!inside(request.offset, request.length, *region)) {
      *status = {MC_REFUSED, "the range is outside the region"};
      return {};
    }
    return begin(region);
  }
  *status = {MC_REFUSED, "the region is not registered at the target"};
  return {};
}

}  // namespace template_driver
