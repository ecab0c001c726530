// How an initiator gets at a region that its owner granted.
#pragma once

#include <cstdint>
#include <memory>

#include "channel.hpp"
#include "copy.hpp"
#include "link.hpp"
#include "mapping.hpp"
#include "region.hpp"
#include "status.hpp"

namespace mooncake::shm {

// Immutable; operations share it, so the mapping outlives the last copy.
class Access {
 public:
  // From a positive kGrant. Falls back to process_vm when the descriptor cannot be mapped.
  static Status open(const Message& grant, const UniqueFd& fd, std::shared_ptr<Link> link,
                     std::shared_ptr<const Access>& access);

  // MC_REFUSED when the range is not inside the region as its owner registered it.
  Status check_range(uint64_t offset, uint64_t length) const;

  Status check_alive() const { return link_->check_alive(); }

  // Moves `length` bytes between a local region and this one, holding a lease on both. The ranges were
  // checked. MC_REFUSED or MC_INVALID, with no byte touched, when the remote or the local region has been
  // withdrawn.
  Status move(mc_opcode opcode, Region& local, uint64_t local_offset, uint64_t remote_offset, uint64_t length,
              Stores stores) const;

 private:
  Status move_by_process_vm(mc_opcode opcode, std::byte* local, uint64_t remote_offset,
                            uint64_t length) const;

  std::shared_ptr<Link> link_;
  uint32_t slot_ = 0;
  uint32_t token_ = 0;
  uint64_t length_ = 0;
  std::shared_ptr<Mapping> mapping_;  // null: process_vm
  uint64_t address_ = 0;
};

}  // namespace mooncake::shm
