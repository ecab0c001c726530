#include "channel.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace mooncake::shm {

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

Channel::~Channel() { shut(); }

void Channel::shut() {
  if (socket_.valid()) shutdown(socket_.get(), SHUT_RDWR);
}

bool Channel::send(const Message& message, std::shared_ptr<const UniqueFd> passed) {
  Waiting item{message, std::move(passed)};
  if (waiting_.empty()) {
    switch (send_now(item)) {
      case Sent::kYes:
        return true;
      case Sent::kNever:
        return false;
      case Sent::kLater:
        break;
    }
  }
  waiting_.push_back(std::move(item));
  return true;
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

Channel::Sent Channel::send_now(const Waiting& item) {
  iovec part{const_cast<Message*>(&item.message), sizeof item.message};
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
  for (;;) {
    if (sendmsg(socket_.get(), &packet, MSG_NOSIGNAL | MSG_DONTWAIT) >= 0) return Sent::kYes;
    if (errno == EINTR) continue;
    return errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS ? Sent::kLater : Sent::kNever;
  }
}

Channel::Received Channel::receive(Message& message, UniqueFd& passed) {
  passed.reset();
  iovec part{&message, sizeof message};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr packet{};
  packet.msg_iov = &part;
  packet.msg_iovlen = 1;
  packet.msg_control = control;
  packet.msg_controllen = sizeof control;
  ssize_t length;
  do {
    length = recvmsg(socket_.get(), &packet, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (length < 0 && errno == EINTR);
  if (length < 0) return errno == EAGAIN || errno == EWOULDBLOCK ? Received::kNothing : Received::kEnd;
  // Take the descriptor before any check, so that a bad packet leaks none. There is room for one: the kernel
  // closes more.
  for (cmsghdr* header = CMSG_FIRSTHDR(&packet); header != nullptr; header = CMSG_NXTHDR(&packet, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int fd = -1;
    if (header->cmsg_len >= CMSG_LEN(sizeof fd)) std::memcpy(&fd, CMSG_DATA(header), sizeof fd);
    passed.reset(fd);
  }
  if (length == 0) return Received::kEnd;
  bool whole = length == sizeof message && (packet.msg_flags & MSG_TRUNC) == 0;
  return whole && message.version == kWireVersion ? Received::kMessage : Received::kGarbage;
}

}  // namespace mooncake::shm
