#include "access.hpp"

#include <sys/uio.h>

#include <cerrno>
#include <utility>

namespace mooncake::shm {
namespace {

// Leaves on every path.
class Lease {
 public:
  Lease(LeaseSlot& slot, uint32_t token) : slot_(slot), token_(token), held_(slot.enter(token)) {}
  ~Lease() {
    if (held_) slot_.leave(token_);
  }
  Lease(const Lease&) = delete;
  Lease& operator=(const Lease&) = delete;
  bool held() const { return held_; }

 private:
  LeaseSlot& slot_;
  uint32_t token_;
  bool held_;
};

Status process_vm_failure(int error, pid_t pid) {
  std::string who = "process " + std::to_string(pid);
  switch (error) {
    case EPERM:
      return failed(MC_UNSUPPORTED, "the kernel does not let this process use the memory of " + who +
                                        " (EPERM: another user, kernel.yama.ptrace_scope, or a container); "
                                        "memory from engine.allocate() needs no such right");
    case ENOSYS:
      return failed(MC_UNSUPPORTED, "this kernel or its seccomp filter has no process_vm_readv (ENOSYS)");
    case ESRCH:
      return failed(MC_UNREACHABLE, who + " has ended");
    default:
      return system_failure(MC_IO, "cannot use the memory of " + who, error);
  }
}

}  // namespace

Status Access::open(const Message& grant, const UniqueFd& fd, std::shared_ptr<Link> link,
                    std::shared_ptr<const Access>& access) {
  if (grant.slot >= LeasePage::kSlots || grant.length == 0)
    return failed(MC_UNREACHABLE, "the peer's grant is garbled");
  auto made = std::make_shared<Access>();
  made->link_ = std::move(link);
  made->slot_ = grant.slot;
  made->token_ = grant.token;
  made->length_ = grant.length;
  made->address_ = grant.address;
  Status unmapped = failed(MC_UNSUPPORTED, "the memory has no descriptor to share");
  if (grant.mode == AccessMode::kMapped) {
    unmapped = fd.valid() ? Mapping::open(fd.get(), grant.fd_offset, grant.length, made->mapping_)
                          : failed(MC_UNSUPPORTED,
                                   "its descriptor did not arrive (is the limit of open files reached?)");
  }
  if (!made->mapping_ && made->link_->pid <= 0) {
    return failed(MC_UNSUPPORTED,
                  unmapped.reason + ", and the peer's process is not visible from this pid namespace");
  }
  access = std::move(made);
  return {};
}

Status Access::check_range(uint64_t offset, uint64_t length) const {
  if (offset <= length_ && length <= length_ - offset) return {};
  return failed(MC_REFUSED,
                "the range is outside the region, which has " + std::to_string(length_) + " bytes");
}

Status Access::move(mc_opcode opcode, Region& local, uint64_t local_offset, uint64_t remote_offset,
                    uint64_t length, Stores stores) const {
  Lease own(local.own_use, 0);
  if (!own.held()) return failed(MC_INVALID, "the local region was deregistered while the operation waited");
  Lease granted(link_->leases->slot(slot_), token_);
  if (!granted.held()) return failed(MC_REFUSED, "the region was deregistered by its owner");
  std::byte* here = local.base + local_offset;
  if (!mapping_) return move_by_process_vm(opcode, here, remote_offset, length);
  std::byte* there = mapping_->data() + remote_offset;
  if (opcode == MC_READ) {
    copy_bytes(here, there, length, stores);
  } else {
    copy_bytes(there, here, length, stores);
  }
  return {};
}

Status Access::move_by_process_vm(mc_opcode opcode, std::byte* local, uint64_t remote_offset,
                                  uint64_t length) const {
  auto call = opcode == MC_READ ? process_vm_readv : process_vm_writev;
  uint64_t done = 0;
  while (done < length) {
    iovec here{local + done, length - done};
    iovec there{reinterpret_cast<void*>(address_ + remote_offset + done), length - done};
    ssize_t moved = call(link_->pid, &here, 1, &there, 1, 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return process_vm_failure(errno, link_->pid);
    if (moved == 0) return process_vm_failure(EFAULT, link_->pid);
    done += static_cast<uint64_t>(moved);
  }
  return {};
}

}  // namespace mooncake::shm
