#include "access.hpp"

#include <sys/uio.h>

#include <cerrno>
#include <utility>

namespace mooncake::shm {
namespace {

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
  GrantBody body;
  if (!get_body(grant, body) || grant.slot >= LeasePage::kSlots || grant.length == 0)
    return failed(MC_UNREACHABLE, "the peer's grant is garbled");
  auto made = std::make_shared<Access>();
  made->link_ = std::move(link);
  made->slot_ = &made->link_->leases->slot(grant.slot);
  made->token_ = grant.token;
  made->access_ = grant.access & kAllAccess;
  made->length_ = grant.length;
  made->address_ = body.address;
  Status unmapped = failed(MC_UNSUPPORTED, "the memory has no descriptor to share");
  if (body.mode == AccessMode::kMapped) {
    bool writable = (grant.access & MC_ACCESS_WRITE) != 0;
    unmapped = fd.valid() ? Mapping::open(fd.get(), body.fd_offset, grant.length, writable, made->mapping_)
                          : failed(MC_UNSUPPORTED,
                                   "its descriptor did not arrive (is the limit of open files reached?)");
  }
  if (made->mapping_) {
    made->data_ = made->mapping_->data();
  } else if (Status usable = made->try_process_vm(unmapped); !usable.ok()) {
    return usable;
  }
  access = std::move(made);
  return {};
}

Status Access::try_process_vm(const Status& unmapped) const {
  if (link_->pid <= 0) {
    return failed(MC_UNSUPPORTED,
                  unmapped.reason + ", and the peer's process is not visible from this pid namespace");
  }
  std::byte probe;
  // Found out now, once, and not by every operation. Memory that cannot be read at this moment may be later.
  Status tried = copy_by_process_vm(MC_READ, &probe, 0, 1);
  if (tried.ok() || tried.code == MC_IO) return {};
  return failed(tried.code, unmapped.reason + ", and " + tried.reason);
}

Status Access::refusal(bool allowed) const {
  if (!allowed) {
    return failed(MC_REFUSED, (access_ & MC_ACCESS_READ) != 0 ? "the key allows only reading from the region"
                                                              : "the key allows only writing to the region");
  }
  return failed(MC_REFUSED,
                "the range is outside the region, which has " + std::to_string(length_) + " bytes");
}

Status Access::denial() const {
  if (Status connected = link_->check_socket(); !connected.ok()) return connected;
  return failed(MC_REFUSED, "the region was deregistered or its key revoked by its owner");
}

Status Access::copy_by_process_vm(mc_opcode opcode, std::byte* local, uint64_t remote_offset,
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
