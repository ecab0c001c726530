// Memory of this process that the engine registered.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "lease.hpp"
#include "mooncake_driver.h"
#include "os.hpp"

namespace mooncake::shm {

using Key = std::array<uint8_t, MC_KEY_BYTES>;

struct Region {
  uint64_t id = 0;
  Key key{};
  std::byte* base = nullptr;
  uint64_t length = 0;
  // The memfd behind the memory, when peers may map it; otherwise they get at the memory by process_vm.
  std::shared_ptr<const UniqueFd> fd;
  uint64_t fd_offset = 0;
  // Leases for this side's own operations, so that both kinds of use end in the same way. Token 0 is the live
  // one.
  LeaseSlot own_use;
  std::atomic<bool> withdrawn{false};
};

}  // namespace mooncake::shm
