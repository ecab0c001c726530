#include "region.hpp"

#include <algorithm>

namespace mooncake::nvmeof {

std::shared_ptr<Uses> Region::open(const Key& key) {
  std::lock_guard lock(mutex_);
  uint32_t access = keys_.access_of(key.data());
  if (access == 0) return nullptr;
  auto& uses = uses_[key];
  if (!uses) uses = std::make_shared<Uses>(access);
  return uses;
}

Status Region::grant(const uint8_t* key, uint32_t access) {
  std::lock_guard lock(mutex_);
  return keys_.add(key, access);
}

Status Region::revoke(const uint8_t* key, std::vector<std::shared_ptr<Uses>>& out) {
  std::lock_guard lock(mutex_);
  if (Status status = keys_.revoke(key); !status.ok()) return status;
  for (auto& [name, uses] : uses_) {
    if (key != nullptr && name != driver::key_from(key)) continue;
    uses->revoke();
    out.push_back(uses);
  }
  return {};
}

Status Owner::add(const std::shared_ptr<Region>& region) {
  std::lock_guard lock(mutex_);
  if (closed_) return failed(MC_CLOSED, "the endpoint is closed");
  if (!regions_.emplace(region->id, region).second)
    return failed(MC_INVALID, "region id " + std::to_string(region->id) + " is taken");
  return {};
}

void Owner::remove(uint64_t region_id) {
  std::lock_guard lock(mutex_);
  regions_.erase(region_id);
}

std::shared_ptr<Region> Owner::find(uint64_t region_id) {
  std::lock_guard lock(mutex_);
  auto found = regions_.find(region_id);
  return found == regions_.end() ? nullptr : found->second;
}

uint64_t Owner::late_ns() {
  std::lock_guard lock(mutex_);
  uint64_t longest = 0;
  for (auto& [id, region] : regions_) {
    if (region->device) longest = std::max(longest, region->device->late_ns());
  }
  return longest;
}

std::vector<std::shared_ptr<Region>> Owner::close(std::vector<std::shared_ptr<Uses>>& out) {
  std::lock_guard lock(mutex_);
  closed_ = true;
  std::vector<std::shared_ptr<Region>> found;
  for (auto& [id, region] : regions_) {
    (void)region->revoke(nullptr, out);
    if (region->device || region->on_gpu) found.push_back(region);
  }
  regions_.clear();
  return found;
}

}  // namespace mooncake::nvmeof
