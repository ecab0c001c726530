#include "remote.hpp"

#include <cstring>
#include <string>

namespace mooncake::cxl {

Status RemoteRegion::enter(uint32_t* use) {
  if (blob_.member >= pool_.hosts() * kMembers || blob_.index >= kGrants)
    return failed(MC_REFUSED, "the key names no grant of the pool");
  *use = pool_.begin_use(blob_.member, blob_.index);
  pool_.see(&grant(), sizeof(Grant), blob_.member);
  Status status;
  if (grant().word.load() != valid_word(blob_.generation)) {
    status = refusal();
  } else if (!verified_.load(std::memory_order_acquire)) {
    status = verify();
  }
  if (!status.ok()) leave(*use);
  return status;
}

Status RemoteRegion::verify() {
  std::string name = "region " + std::to_string(region_id_);
  if (!pool_.alive(blob_.member, blob_.epoch)) return check_alive();
  if (grant().region_id != region_id_) return failed(MC_REFUSED, "the key is not one of " + name);
  if (!equal_in_constant_time(grant().key_digest, key_.data(), key_.size()))
    return failed(MC_REFUSED, "wrong access key for " + name);
  uint64_t offset = grant().offset, length = grant().length;
  if (offset > pool_.size() || length > pool_.size() - offset)
    return failed(MC_REFUSED, "the grant of " + name + " is damaged");
  offset_.store(offset);
  length_.store(length);
  access_.store(grant().access);
  verified_.store(true, std::memory_order_release);
  return {};
}

Status RemoteRegion::refusal() const {
  if (Status alive = check_alive(); !alive.ok()) return alive;
  return failed(MC_REFUSED, "the region was deregistered or its key revoked by its owner");
}

Status RemoteRegion::check(mc_opcode opcode, uint64_t offset, uint64_t length) const {
  uint32_t needed = opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
  if ((access_.load(std::memory_order_relaxed) & needed) == 0) {
    return failed(MC_REFUSED, opcode == MC_WRITE ? "the key allows only reading from the region"
                                                 : "the key allows only writing to the region");
  }
  uint64_t size = length_.load(std::memory_order_relaxed);
  if (offset <= size && length <= size - offset) return {};
  return failed(MC_REFUSED, "the range is outside the region, which has " + std::to_string(size) + " bytes");
}

void RemoteRegion::copy(mc_opcode opcode, std::byte* local, uint64_t offset, uint64_t length,
                        Stores stores) const {
  std::byte* there = pool_.data() + offset_.load(std::memory_order_relaxed) + offset;
  bool bypass = pool_.bypasses_caches(blob_.member);
  if (opcode == MC_READ) {
    if (bypass) drop_lines(there, length);
    copy_bytes(local, there, length, stores);
  } else {
    copy_bytes(there, local, length, stores);
    if (bypass) write_back(there, length);
  }
}

Status RemoteRegion::check_alive() const {
  if (pool_.alive(blob_.member, blob_.epoch)) return {};
  return failed(MC_UNREACHABLE, pool_.same_host(blob_.member)
                                    ? "the peer's process has ended or left the pool"
                                    : "the peer's host has not been heard of for lease_s, or left the pool");
}

}  // namespace mooncake::cxl
