#include "socket.hpp"

#include <arpa/inet.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

#include "interrupt.hpp"

namespace mooncake {

namespace {

constexpr int kBacklog = 512;
constexpr int kMaxLookups = 16;

struct AddressesFree {
  void operator()(addrinfo* found) const { freeaddrinfo(found); }
};
using Addresses = std::unique_ptr<addrinfo, AddressesFree>;

// One name on its way through the resolver, which takes as long as it likes: the thread that waits for it is
// not the one that asked.
struct Lookup {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  int rc = EAI_AGAIN;
  Addresses found;
};

std::atomic<int> lookups{0};

addrinfo hints_for(bool passive) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (passive ? AI_PASSIVE : 0);
  return hints;
}

int look_up(const std::string& host, uint16_t port, const addrinfo& hints, Addresses* found) {
  addrinfo* list = nullptr;
  int rc = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (rc == 0) found->reset(list);
  return rc;
}

Status look_up_by(const std::string& host, uint16_t port, const addrinfo& hints, uint64_t deadline_ns,
                  Addresses* found, int* rc) {
  if (++lookups > kMaxLookups) {
    --lookups;
    return Status::error(Code::kUnreachable, "cannot resolve '" + host +
                                                 "': the resolver does not answer, and " +
                                                 std::to_string(kMaxLookups) + " names wait for it already");
  }
  auto lookup = std::make_shared<Lookup>();
  auto task = [lookup, host, port, hints] {
    Addresses addresses;
    int result = look_up(host, port, hints, &addresses);
    std::lock_guard lock(lookup->mutex);
    lookup->rc = result;
    lookup->found = std::move(addresses);
    lookup->done = true;
    lookup->ended.notify_all();
    --lookups;
  };
  try {
    std::thread(task).detach();
  } catch (const std::system_error& error) {
    --lookups;
    return Status::error(Code::kUnreachable, "cannot resolve '" + host + "': no thread: " + error.what());
  }
  std::unique_lock lock(lookup->mutex);
  if (!wait_until(lookup->ended, lock, deadline_ns, [&] { return lookup->done; })) {
    return Status::error(
        Code::kUnreachable,
        "cannot resolve '" + host + "': the resolver (see /etc/resolv.conf) gave no answer in time");
  }
  *rc = lookup->rc;
  *found = std::move(lookup->found);
  return {};
}

Status resolve(const std::string& host, uint16_t port, bool passive, uint64_t deadline_ns, Addresses* found) {
  addrinfo hints = hints_for(passive);
  addrinfo numeric = hints;
  numeric.ai_flags |= AI_NUMERICHOST;
  int rc = look_up(host, port, numeric, found);
  if (rc == 0) return {};
  Status status = look_up_by(host, port, hints, deadline_ns, found, &rc);
  if (status.ok() && rc != 0)
    status = Status::error(Code::kUnreachable, "cannot resolve '" + host + "': " + gai_strerror(rc));
  if (!status.ok() && passive) status.code = Code::kInvalid;
  return status;
}

// Finishes a non-blocking connect; 0, or the errno of why not.
int finish_connect(int fd, uint64_t deadline_ns) {
  pollfd waiting{fd, POLLOUT, 0};
  for (;;) {
    if (interrupted != nullptr && interrupted()) return EINTR;
    uint64_t until = slice_until(deadline_ns);
    int ready = poll(&waiting, 1, poll_timeout_ms(until));
    if (ready > 0) break;
    if (ready == 0 && until >= deadline_ns) return ETIMEDOUT;
    if (ready < 0 && errno != EINTR) return errno;
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

std::string where(const std::string& host, uint16_t port) {
  bool brackets = host.find(':') != std::string::npos;
  return (brackets ? "[" + host + "]" : host) + ":" + std::to_string(port);
}

std::string where(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = "?";
  if (address.ss_family == AF_INET6) {
    auto& v6 = reinterpret_cast<const sockaddr_in6&>(address);
    inet_ntop(AF_INET6, &v6.sin6_addr, text, sizeof(text));
    return where(text, ntohs(v6.sin6_port));
  }
  auto& v4 = reinterpret_cast<const sockaddr_in&>(address);
  inet_ntop(AF_INET, &v4.sin_addr, text, sizeof(text));
  return where(text, ntohs(v4.sin_port));
}

void tune_stream(int fd, double silence_s) {
  // A third of the time idle, then probes: at most one a second, at least three.
  int idle_s = std::max(1, static_cast<int>(silence_s / 3));
  int interval_s = std::max(1, (static_cast<int>(silence_s) - idle_s) / 5);
  int probes = std::max(1, (static_cast<int>(silence_s) - idle_s) / interval_s);
  int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof(on));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle_s, sizeof(idle_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval_s, sizeof(interval_s));
  setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof(probes));
  // Linux 6.15: repeats and probes come at least so often, so that a link that is back is noticed soon.
  constexpr int kRtoMaxMs = 44;
  int rto_max_ms = std::max(1000, static_cast<int>(silence_s * 1000 / 3));
  setsockopt(fd, IPPROTO_TCP, kRtoMaxMs, &rto_max_ms, sizeof(rto_max_ms));
}

namespace {

// 0, or the errno of why not.
int listen_at(const addrinfo& address, uint16_t port, Descriptor* out) {
  Descriptor made(socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  int fd = made.get();
  if (fd < 0) return errno;
  int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  sockaddr_storage bound{};
  memcpy(&bound, address.ai_addr, address.ai_addrlen);
  if (bound.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6&>(bound).sin6_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in&>(bound).sin_port = htons(port);
  }
  if (bind(fd, reinterpret_cast<sockaddr*>(&bound), address.ai_addrlen) != 0 || listen(fd, kBacklog) != 0)
    return errno;
  *out = std::move(made);
  return 0;
}

}  // namespace

Status listen_on(const std::string& host, uint16_t port, uint16_t last_port, Descriptor* out,
                 uint16_t* bound_port) {
  constexpr double kLookupS = 10;
  Addresses addresses;
  Status resolved = resolve(host, port, true, deadline_after(kLookupS), &addresses);
  if (!resolved.ok()) return resolved;
  int error = EADDRINUSE;
  for (uint32_t tried = port; tried <= std::max(port, last_port) && error == EADDRINUSE; ++tried)
    error = listen_at(*addresses, static_cast<uint16_t>(tried), out);
  if (error != 0) {
    const char* remedy =
        error == EADDRINUSE      ? "; another process has it, choose another port or 0 for any free one"
        : error == EMFILE        ? "; raise `ulimit -n`"
        : error == EADDRNOTAVAIL ? "; no interface of this machine has that address, `ip addr` lists them"
        : error == EACCES        ? "; ports below 1024 need privileges, choose a higher one or 0"
                                 : "";
    std::string range = last_port > port ? " to " + std::to_string(last_port) : "";
    return Status::error(Code::kInvalid,
                         "cannot listen on " + where(host, port) + range + ": " + strerror(error) + remedy);
  }
  sockaddr_storage bound{};
  socklen_t length = sizeof(bound);
  getsockname(out->get(), reinterpret_cast<sockaddr*>(&bound), &length);
  *bound_port = ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(bound).sin6_port
                                                  : reinterpret_cast<sockaddr_in&>(bound).sin_port);
  return {};
}

Status connect_to(const std::string& host, uint16_t port, uint64_t deadline_ns, Descriptor* out) {
  Addresses addresses;
  Status resolved = resolve(host, port, false, deadline_ns, &addresses);
  if (!resolved.ok()) return resolved;
  uint64_t left = 0;
  for (addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) ++left;
  int error = EHOSTUNREACH;
  for (addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next, --left) {
    Descriptor made(socket(address->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    int fd = made.get();
    if (fd < 0) {
      error = errno;
      continue;
    }
    error = connect(fd, address->ai_addr, address->ai_addrlen) == 0 ? 0 : errno;
    uint64_t now = now_ns();
    // One address that swallows everything must not take the time of the others.
    uint64_t share = deadline_ns > now ? now + (deadline_ns - now) / left : now;
    if (error == EINPROGRESS) error = finish_connect(fd, share);
    if (error == 0) {
      *out = std::move(made);
      return {};
    }
  }
  const char* remedy = error == EMFILE ? "; raise `ulimit -n`" : "";
  return Status::error(Code::kUnreachable,
                       "cannot connect to " + where(host, port) + ": " + strerror(error) + remedy);
}

}  // namespace mooncake
