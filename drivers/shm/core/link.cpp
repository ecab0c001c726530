#include "link.hpp"

#include <poll.h>

namespace mooncake::shm {

Status Link::check_alive() const {
  // poll() passes over a negative descriptor: a missing pidfd needs no case of its own.
  pollfd watched[2] = {{channel.fd(), POLLRDHUP, 0}, {pidfd.get(), POLLIN, 0}};
  if (::poll(watched, 2, 0) > 0 && (watched[0].revents != 0 || watched[1].revents != 0)) {
    return failed(MC_UNREACHABLE, "the peer has closed its endpoint or its process has ended");
  }
  return {};
}

}  // namespace mooncake::shm
