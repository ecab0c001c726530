// Taking connections from a listening socket that is watched for as long as it is readable.
#pragma once

#include <sys/socket.h>

#include <cerrno>
#include <cstdint>

#include "../os.hpp"

namespace mooncake::driver {

enum class Accepted {
  kPeer,
  kNobody,  // is waiting any more
  kRest,    // nothing to accept with: the listener stays readable, and must not be watched for a while
};

// How long a listener rests then.
constexpr uint64_t kAcceptRestNs = 100'000'000;

// The next who waits at a listener that does not block. Who hung up while waiting is passed over.
inline Accepted accept_next(int listener, UniqueFd& socket) {
  for (;;) {
    socket.reset(accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) return Accepted::kPeer;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Accepted::kNobody;
    bool gone = errno == ECONNABORTED || errno == EINTR || errno == EPROTO;
    // Mostly EMFILE, ENFILE, ENOBUFS or ENOMEM; whatever else it is will not be better in a moment either.
    if (!gone) return Accepted::kRest;
  }
}

}  // namespace mooncake::driver
