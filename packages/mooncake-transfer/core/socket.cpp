#include "socket.hpp"

#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

namespace mooncake {

namespace {

constexpr int kBacklog = 512;
constexpr int kKeepIdleS = 5;
constexpr int kKeepIntervalS = 2;
constexpr int kKeepProbes = 5;
constexpr unsigned kUserTimeoutMs = 15'000;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

std::string where(const std::string& host, uint16_t port) { return host + ":" + std::to_string(port); }

Status resolve(const std::string& host, uint16_t port, bool passive, Addresses* addresses) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  addrinfo* found = nullptr;
  int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) {
    return Status::error(passive ? Code::kInvalid : Code::kUnreachable,
                         "cannot resolve '" + host + "': " + gai_strerror(rc));
  }
  *addresses = Addresses(found, &freeaddrinfo);
  return {};
}

// Finishes a non-blocking connect; 0, or the errno of why not.
int finish_connect(int fd, uint64_t deadline_ns) {
  pollfd waiting{fd, POLLOUT, 0};
  for (;;) {
    int ready = poll(&waiting, 1, poll_timeout_ms(deadline_ns));
    if (ready > 0) break;
    if (ready == 0) return ETIMEDOUT;
    if (errno != EINTR) return errno;
  }
  int error = 0;
  socklen_t length = sizeof(error);
  getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &length);
  return error;
}

}  // namespace

int poll_timeout_ms(uint64_t deadline_ns) {
  uint64_t now = now_ns();
  if (deadline_ns <= now) return 0;
  uint64_t ms = (deadline_ns - now + 999'999) / 1'000'000;
  return ms > 1'000'000'000 ? 1'000'000'000 : static_cast<int>(ms);
}

void tune_stream(int fd) {
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepIdleS, sizeof(kKeepIdleS));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepIntervalS, sizeof(kKeepIntervalS));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &kKeepProbes, sizeof(kKeepProbes));
  setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &kUserTimeoutMs, sizeof(kUserTimeoutMs));
}

Status listen_on(const std::string& host, uint16_t port, Descriptor* out, uint16_t* bound_port) {
  Addresses addresses(nullptr, &freeaddrinfo);
  Status resolved = resolve(host, port, true, &addresses);
  if (!resolved.ok()) return resolved;
  Descriptor made(socket(addresses->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  int fd = made.get();
  if (fd < 0) return Status::error(Code::kIo, std::string("cannot make a socket: ") + strerror(errno));
  int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(fd, addresses->ai_addr, addresses->ai_addrlen) != 0 || listen(fd, kBacklog) != 0) {
    int error = errno;
    const char* remedy =
        error == EADDRINUSE ? "; another process has it, choose another port or 0 for any free one" : "";
    return Status::error(Code::kInvalid,
                         "cannot listen on " + where(host, port) + ": " + strerror(error) + remedy);
  }
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  getsockname(fd, reinterpret_cast<sockaddr*>(&bound), &length);
  *bound_port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                  : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  *out = std::move(made);
  return {};
}

Status connect_to(const std::string& host, uint16_t port, uint64_t deadline_ns, Descriptor* out) {
  Addresses addresses(nullptr, &freeaddrinfo);
  Status resolved = resolve(host, port, false, &addresses);
  if (!resolved.ok()) return resolved;
  int error = EHOSTUNREACH;
  for (addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    Descriptor made(socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int fd = made.get();
    if (fd < 0) {
      error = errno;
      continue;
    }
    error = connect(fd, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
    if (error == EINPROGRESS) error = finish_connect(fd, deadline_ns);
    if (error == 0) {
      tune_stream(fd);
      *out = std::move(made);
      return {};
    }
  }
  return Status::error(Code::kUnreachable, "cannot connect to " + where(host, port) + ": " + strerror(error));
}

}  // namespace mooncake
