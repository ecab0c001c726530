#include "channel.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace mooncake::verbs {

void Channel::watch(uint32_t dead_peer_timeout_ms) {
  int on = 1, idle = 3, interval = 1;
  int count = std::max(1, static_cast<int>(dead_peer_timeout_ms / 1000));
  unsigned timeout = dead_peer_timeout_ms;
  setsockopt(fd(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  setsockopt(fd(), SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  setsockopt(fd(), IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  setsockopt(fd(), IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  setsockopt(fd(), IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  setsockopt(fd(), IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout, sizeof timeout);
}

bool Channel::receive() {
  char buffer[16 << 10];
  for (;;) {
    ssize_t count = recv(fd(), buffer, sizeof buffer, 0);
    if (count > 0) {
      in_.append(buffer, static_cast<size_t>(count));
      if (in_.size() > kMaxPayload + kHeaderBytes) return true;  // first the messages, then more
      continue;
    }
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return true;
    reason_ = count == 0 ? "the peer closed the connection" : std::generic_category().message(errno);
    return false;
  }
}

bool Channel::next(Message* kind, std::string* payload) {
  if (in_.size() < kHeaderBytes) return false;
  auto word = [&](size_t at) {
    uint32_t value = 0;
    for (size_t i = 0; i < 4; ++i) value |= uint32_t{static_cast<uint8_t>(in_[at + i])} << (8 * i);
    return value;
  };
  uint32_t length = word(8);
  auto type = static_cast<uint8_t>(in_[4]);
  if (word(0) != kMagic || length > kMaxPayload || type == 0 ||
      type > static_cast<uint8_t>(Message::kTaken)) {
    reason_ = "what answers there does not speak this driver's protocol";
    return false;
  }
  if (in_.size() < kHeaderBytes + length) return false;
  *kind = static_cast<Message>(type);
  payload->assign(in_, kHeaderBytes, length);
  in_.erase(0, kHeaderBytes + length);
  return true;
}

bool Channel::send(std::string_view bytes) {
  if (failed()) return false;
  out_.append(bytes);
  while (!out_.empty()) {
    ssize_t count = ::send(fd(), out_.data(), out_.size(), MSG_NOSIGNAL);
    if (count > 0) {
      out_.erase(0, static_cast<size_t>(count));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      return true;
    } else if (errno != EINTR) {
      reason_ = std::generic_category().message(errno);
      return false;
    }
  }
  return true;
}

}  // namespace mooncake::verbs
