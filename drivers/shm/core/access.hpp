// How an initiator gets at a region that its owner granted.
#pragma once

#include <cstdint>
#include <memory>

#include "link.hpp"
#include "mapping.hpp"
#include "os.hpp"
#include "region.hpp"
#include "wire.hpp"

namespace mooncake::shm {

// Immutable; operations share it, so the mapping outlives the last copy.
class Access {
 public:
  // From a positive kGrant. Falls back to process_vm when the descriptor cannot be mapped.
  static Status open(const Message& grant, const UniqueFd& fd, std::shared_ptr<Link> link,
                     std::shared_ptr<const Access>& access);

  // Whether an operation may be tried at all: MC_REFUSED when the range is not inside the region as its owner
  // registered it, or the key does not allow it.
  Status check(mc_opcode opcode, uint64_t offset, uint64_t length) const {
    bool allowed = (access_ & (opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE)) != 0;
    if (allowed && offset <= length_ && length <= length_ - offset) [[likely]]
      return {};
    return refusal(allowed);
  }

  Status check_alive() const { return link_->check_alive(); }

  // False: hands off, the region is withdrawn and denial() tells why. True: copy() may be used until leave().
  bool enter() const { return slot_->enter(token_); }
  void leave() const { slot_->leave(token_); }
  // MC_REFUSED, or MC_UNREACHABLE when the owner ended the connection.
  Status denial() const;

  // Moves `length` bytes between local memory and this region. The range was checked.
  Status copy(mc_opcode opcode, std::byte* local, uint64_t remote_offset, uint64_t length,
              Stores stores) const {
    if (data_ == nullptr) return copy_by_process_vm(opcode, local, remote_offset, length);
    std::byte* there = data_ + remote_offset;
    if (opcode == MC_READ) {
      copy_bytes(local, there, length, stores);
    } else {
      copy_bytes(there, local, length, stores);
    }
    return {};
  }

  // Null for memory that is reached by process_vm.
  const std::shared_ptr<Mapping>& mapping() const { return mapping_; }

 private:
  Status try_process_vm(const Status& unmapped) const;
  Status refusal(bool allowed) const;
  Status copy_by_process_vm(mc_opcode opcode, std::byte* local, uint64_t remote_offset,
                            uint64_t length) const;

  std::shared_ptr<Link> link_;
  LeaseSlot* slot_ = nullptr;
  uint32_t token_ = 0;
  uint32_t access_ = 0;
  uint64_t length_ = 0;
  std::shared_ptr<Mapping> mapping_;
  std::byte* data_ = nullptr;  // null: process_vm
  uint64_t address_ = 0;
};

}  // namespace mooncake::shm
