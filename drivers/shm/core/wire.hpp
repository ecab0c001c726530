// What this driver says over its control connections beside what all such drivers say.
#pragma once

#include <cstdint>

#include "support/peers/channel.hpp"
#include "support/peers/lease.hpp"

namespace mooncake::shm {

using driver::Channel;
using driver::LeasePage;
using driver::LeaseSlot;
using driver::make_message;
using driver::Message;
using driver::MessageKind;
using driver::reason_of;
using driver::set_reason;

// A target's message of kind kDriver before the welcome carries its sign of life. A kRevoke names the region
// id and key whose grant is withdrawn.

enum class AccessMode : uint32_t {
  kMapped = 1,     // the descriptor that comes along, from `fd_offset`
  kProcessVm = 2,  // `address` in the target's address space, by process_vm_readv and process_vm_writev
};

// The body of a grant.
struct GrantBody {
  AccessMode mode;
  uint32_t reserved;
  uint64_t address;
  uint64_t fd_offset;
};

}  // namespace mooncake::shm
