// What every driver asks of a description of memory before it registers it.
#pragma once

#include <cstddef>
#include <string>

#include "mooncake_driver.h"
#include "status.hpp"

namespace mooncake::driver {

// An older engine knows fewer members: from numa_node on they came with later minors of the ABI.
inline Status check_version(const mc_memory& memory) {
  if (memory.struct_size >= offsetof(mc_memory, numa_node)) return {};
  return failed(MC_INVALID, "the memory description is of an unknown version");
}

// Addresses of one of `kinds`, of which each is a bit 1 << mc_memory_kind. MC_UNSUPPORTED with `refusal` for
// another kind, MC_INVALID for what cannot be.
inline Status check_memory(const mc_memory& memory, uint64_t kinds, const std::string& refusal) {
  if (Status status = check_version(memory); !status.ok()) return status;
  if (memory.kind >= 64 || (kinds >> memory.kind & 1) == 0) return failed(MC_UNSUPPORTED, refusal);
  if (memory.address == 0 || memory.length == 0 || memory.address + memory.length < memory.address)
    return failed(MC_INVALID, "the memory is empty or wraps around the address space");
  return {};
}

}  // namespace mooncake::driver
