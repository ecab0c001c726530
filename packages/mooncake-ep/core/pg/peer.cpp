#include "peer.hpp"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdexcept>

#include "words.hpp"

namespace mooncake::ep::pg {

namespace {

driver::UniqueFd watch_process(int pid) {
  driver::UniqueFd process(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
  if (!process.valid())
    fail_with_errno("cannot watch process " + std::to_string(pid) + " (Linux 5.3 or newer?)");
  return process;
}

}  // namespace

Peer Peer::own(uint64_t group_id, const Layout& layout) {
  Peer peer;
  peer.memory_ = SharedMemory::create("mooncake-pg", layout.nbytes());
  peer.header() = {kMemoryMagic, group_id, 0};
  return peer;
}

Peer Peer::open(uint64_t group_id, uint64_t claim) {
  Peer peer;
  // Watched first: if the number is another process's by now, the memory behind it is not of this claim.
  peer.process_ = watch_process(Claim::pid(claim));
  peer.memory_ = SharedMemory::open(Claim::pid(claim), Claim::fd(claim));
  auto known = [](uint64_t word) { return word | 1; };
  const MemoryHeader& header = peer.header();
  if (peer.memory_.nbytes() < sizeof(MemoryHeader) || header.magic != kMemoryMagic ||
      header.group_id != group_id || known(header.claim) != known(claim)) {
    throw std::runtime_error("process " + std::to_string(Claim::pid(claim)) + " is of another group by now");
  }
  return peer;
}

bool Peer::dead() const {
  if (!process_.valid()) return false;
  pollfd poll{process_.get(), POLLIN, 0};
  return ::poll(&poll, 1, 0) == 1;
}

}  // namespace mooncake::ep::pg
