#include "link.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace mooncake {

namespace {

Status trouble(const tls::Session& session) {
  return Status::error(session.is_socket_error() ? Code::kUnreachable : Code::kUntrusted, session.reason());
}

}  // namespace

Link::Io Link::shake_hands(Status* why) {
  switch (session->handshake()) {
    case tls::Outcome::kDone:
      shaking_hands = wants_write = false;
      return Io::kSome;
    case tls::Outcome::kWantRead:
      wants_write = false;
      return Io::kNothing;
    case tls::Outcome::kWantWrite:
      wants_write = true;
      return Io::kNothing;
    case tls::Outcome::kClosed:
      *why = Status::error(Code::kUnreachable, "the peer closed the connection during the TLS handshake");
      return Io::kEnded;
    default:
      *why = trouble(*session);
      return Io::kEnded;
  }
}

Link::Io Link::receive(char* buffer, size_t capacity, size_t* bytes, Status* why) {
  if (session) {
    tls::Outcome outcome = session->read(buffer, capacity, bytes);
    wants_write = outcome == tls::Outcome::kWantWrite;
    if (outcome == tls::Outcome::kDone) return Io::kSome;
    if (outcome == tls::Outcome::kWantRead || wants_write) return Io::kNothing;
    *why = outcome == tls::Outcome::kClosed ? Status::error(Code::kUnreachable, session->reason())
                                            : trouble(*session);
    return Io::kEnded;
  }
  ssize_t n = recv(fd, buffer, capacity, 0);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return Io::kNothing;
  if (n <= 0) {
    *why = Status::error(Code::kUnreachable, n == 0 ? "the peer closed the connection" : strerror(errno));
    return Io::kEnded;
  }
  *bytes = static_cast<size_t>(n);
  return Io::kSome;
}

bool Link::send_frame(uint8_t type, uint64_t request, const std::string& method, const std::string& body) {
  FrameHeader header{static_cast<uint32_t>(body.size()), kFrameVersion, type,
                     static_cast<uint16_t>(method.size()), request};
  size_t skip = 0;
  if (!session && unsent.empty()) {  // straight from the caller's memory
    iovec parts[3] = {{&header, sizeof(header)},
                      {const_cast<char*>(method.data()), method.size()},
                      {const_cast<char*>(body.data()), body.size()}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 3;
    ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EINTR) return false;
    skip = n > 0 ? static_cast<size_t>(n) : 0;
    if (skip == sizeof(header) + method.size() + body.size()) return true;
  }
  for (auto [data, size] : {std::pair{reinterpret_cast<const char*>(&header), sizeof(header)},
                            std::pair{method.data(), method.size()}, std::pair{body.data(), body.size()}}) {
    size_t gone = skip < size ? skip : size;
    unsent.append(data + gone, size - gone);
    skip -= gone;
  }
  return flush();
}

bool Link::flush() {
  while (sent < unsent.size() && !shaking_hands) {
    const char* data = unsent.data() + sent;
    size_t length = unsent.size() - sent, n = 0;
    if (session) {
      tls::Outcome outcome = session->write(data, length, &n);
      if (outcome == tls::Outcome::kWantRead || outcome == tls::Outcome::kWantWrite) break;
      if (outcome != tls::Outcome::kDone) return false;
    } else {
      ssize_t written = ::send(fd, data, length, MSG_NOSIGNAL);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0 && errno != EAGAIN) return false;
      if (written < 0) break;
      n = static_cast<size_t>(written);
    }
    sent += n;
  }
  if (sent == unsent.size()) {
    unsent.clear();
    sent = 0;
    if (unsent.capacity() > kKeptBuffer) unsent.shrink_to_fit();
  } else if (sent > unsent.size() / 2) {
    // A peer that never quite keeps up must not make us keep all that was ever sent to it.
    unsent.erase(0, std::exchange(sent, 0));
  }
  return true;
}

void Link::watch(int epoll_fd) {
  epoll_event event{};
  event.events = (paused || polled ? 0u : static_cast<uint32_t>(EPOLLIN)) |
                 (waiting_bytes() > 0 || wants_write ? static_cast<uint32_t>(EPOLLOUT) : 0u);
  event.data.u64 = id;
  if (closed || event.events == watched) return;
  if (epoll_ctl(epoll_fd, EPOLL_CTL_MOD, fd, &event) == 0) watched = event.events;
}

}  // namespace mooncake
