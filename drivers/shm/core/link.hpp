// What an initiator holds of a living peer.
#pragma once

#include <sys/types.h>

#include <memory>
#include <utility>

#include "life.hpp"
#include "os.hpp"
#include "wire.hpp"

namespace mooncake::shm {

// The end of the socket tells the owner of the memory that no copy of ours is in flight. So every Access
// shares the link, and the socket is shut only when the last copy that could use it is over.
struct Link {
  Link(UniqueFd socket, pid_t peer, UniqueFd its_end)
      : channel(std::move(socket)), pid(peer), pidfd(std::move(its_end)) {}

  // MC_OK while the peer lives. One load, where the peer's kernel shows its life; else one system call.
  Status check_alive() const;
  // MC_OK while the peer lives and keeps the connection: one system call.
  Status check_socket() const;

  Channel channel;
  pid_t pid;       // 0: not visible in our pid namespace
  UniqueFd pidfd;  // tells of the peer's end even where a forked child of it keeps the socket open
  std::shared_ptr<const LifeSign> life;  // comes before the welcome
  std::shared_ptr<LeasePage> leases;     // comes with the welcome
};

}  // namespace mooncake::shm
