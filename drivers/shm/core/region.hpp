// Memory of this process that the engine registered.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "mooncake_driver.h"
#include "os.hpp"
#include "support/keys.hpp"
#include "support/peers/lease.hpp"

namespace mooncake::shm {

using driver::kAllAccess;
using driver::Key;

// A key that opens the region, and how far.
struct RegionKey {
  Key key{};
  uint32_t access = kAllAccess;  // mc_access bits
  bool revoked = false;
};

struct Region {
  uint64_t id = 0;
  std::vector<RegionKey> keys;  // the first is the memory's own; guarded by the target's mutex
  std::byte* base = nullptr;
  uint64_t length = 0;
  // The memfd behind the memory, when peers may map it; otherwise they get at the memory by process_vm.
  std::shared_ptr<const UniqueFd> fd;
  std::shared_ptr<const UniqueFd> read_only_fd;  // made with the first key that only reads
  uint64_t fd_offset = 0;
  // Leases for this side's own operations that copy threads carry out, so that both kinds of use end in the
  // same way. Token 0 is the live one.
  driver::LeaseSlot own_use;
  std::atomic<bool> withdrawn{false};
};

}  // namespace mooncake::shm
