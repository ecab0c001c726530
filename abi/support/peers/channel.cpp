#include "channel.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace mooncake::driver {
namespace {

constexpr uint32_t kWireVersion = 0x4d435002;  // "MCP", 2: also tells byte orders apart

}  // namespace

Message make_message(MessageKind kind) {
  Message message;
  std::memset(&message, 0, sizeof message);  // padding too: it crosses to another process
  message.version = kWireVersion;
  message.kind = kind;
  return message;
}

void set_reason(Message& message, const Status& status) {
  message.status = status.code;
  std::strncpy(message.reason, status.reason.c_str(), sizeof message.reason - 1);
}

Status reason_of(const Message& message) {
  bool known = message.status >= MC_OK && message.status <= MC_CLOSED;
  return {known ? static_cast<mc_status>(message.status) : MC_IO,
          std::string(message.reason, strnlen(message.reason, sizeof message.reason))};
}

void Channel::shut() {
  if (socket_.valid()) shutdown(socket_.get(), SHUT_RDWR);
}

bool Channel::send(const Message& message, std::shared_ptr<const UniqueFd> passed) {
  waiting_.push_back({message, std::move(passed)});
  return waiting_.size() > 1 || flush();
}

bool Channel::flush() {
  while (!waiting_.empty()) {
    Sent sent = send_now(waiting_.front());
    if (sent == Sent::kNever) return false;
    if (sent == Sent::kLater) return true;
    waiting_.pop_front();
  }
  return true;
}

Channel::Sent Channel::send_now(Waiting& item) {
  while (item.sent < sizeof item.message) {
    iovec part{reinterpret_cast<char*>(&item.message) + item.sent, sizeof item.message - item.sent};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr packet{};
    packet.msg_iov = &part;
    packet.msg_iovlen = 1;
    if (item.passed) {
      packet.msg_control = control;
      packet.msg_controllen = sizeof control;
      cmsghdr* header = CMSG_FIRSTHDR(&packet);
      header->cmsg_level = SOL_SOCKET;
      header->cmsg_type = SCM_RIGHTS;
      header->cmsg_len = CMSG_LEN(sizeof(int));
      int fd = item.passed->get();
      std::memcpy(CMSG_DATA(header), &fd, sizeof fd);
    }
    ssize_t sent = sendmsg(socket_.get(), &packet, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0)
      return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? Sent::kLater : Sent::kNever;
    item.sent += static_cast<size_t>(sent);
    item.passed.reset();
  }
  return Sent::kYes;
}

Channel::Received Channel::receive(Message& message, UniqueFd& passed) {
  passed.reset();
  while (received_ < sizeof partial_) {
    iovec part{reinterpret_cast<char*>(&partial_) + received_, sizeof partial_ - received_};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr packet{};
    packet.msg_iov = &part;
    packet.msg_iovlen = 1;
    packet.msg_control = control;
    packet.msg_controllen = sizeof control;
    ssize_t length = recvmsg(socket_.get(), &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (length < 0 && errno == EINTR) continue;
    if (length < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Received::kNothing : Received::kEnd;
    // Take the descriptor before any check, so that a bad packet leaks none. There is room for one: the
    // kernel closes more.
    for (cmsghdr* header = CMSG_FIRSTHDR(&packet); header != nullptr; header = CMSG_NXTHDR(&packet, header)) {
      if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
      int fd = -1;
      if (header->cmsg_len >= CMSG_LEN(sizeof fd)) std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
      passed_.reset(fd);
    }
    if (length == 0) return Received::kEnd;
    if ((packet.msg_flags & MSG_TRUNC) != 0) return Received::kGarbage;
    received_ += static_cast<size_t>(length);
    // The first bytes tell a stranger early: it might never send the rest.
    if (received_ >= sizeof partial_.version && partial_.version != kWireVersion) return Received::kGarbage;
  }
  received_ = 0;
  if (partial_.body_length > kBodyBytes) return Received::kGarbage;
  message = partial_;
  passed = std::move(passed_);
  return Received::kMessage;
}

}  // namespace mooncake::driver
