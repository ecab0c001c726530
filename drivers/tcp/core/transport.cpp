#include "transport.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace mooncake_tcp {

using mooncake::tls::Outcome;

namespace {
// Four records of TLS. What is sent is copied here first, because a record that did not fit the socket must
// be sent again as it was, and memory may be taken away meanwhile.
constexpr size_t kStagedBytes = 64 << 10;
}  // namespace

void Transport::open(Descriptor socket, const mooncake::tls::Context* tls, Side side) {
  socket_ = std::move(socket);
  if (tls == nullptr) return;
  // The certificate need not be for the address: the nonce in the first frame says which endpoint it must be,
  // and it comes from the peer over a channel of its own.
  tls_.emplace(side == Side::kConnecting ? mooncake::tls::Session::connect(*tls, socket_.get(), "")
                                         : mooncake::tls::Session::accept(*tls, socket_.get()));
  staged_.resize(kStagedBytes);
}

void Transport::close() {
  tls_.reset();
  socket_.reset();
  staged_ = {};
  staged_begin_ = staged_end_ = 0;
  wants_room_ = false;
}

ssize_t Transport::send(iovec* vectors, size_t count) {
  if (!tls_) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = count;
    return sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  if (pending() && !push()) return -1;
  for (size_t i = 0; i < count && staged_end_ < staged_.size(); ++i) {
    size_t part = std::min(vectors[i].iov_len, staged_.size() - staged_end_);
    memcpy(staged_.data() + staged_end_, vectors[i].iov_base, part);
    staged_end_ += part;
  }
  auto taken = static_cast<ssize_t>(staged_end_);
  return push() || errno == EAGAIN ? taken : -1;
}

bool Transport::push() {
  while (pending()) {
    size_t sent = 0;
    Outcome outcome = tls_->write(staged_.data() + staged_begin_, staged_end_ - staged_begin_, &sent);
    if (outcome != Outcome::kDone) return failed(outcome), false;
    staged_begin_ += sent;
  }
  staged_begin_ = staged_end_ = 0;
  wants_room_ = false;
  return true;
}

ssize_t Transport::receive(iovec* vectors, size_t count) {
  if (!tls_) {
    msghdr message{};
    message.msg_iov = vectors;
    message.msg_iovlen = count;
    return recvmsg(socket_.get(), &message, MSG_DONTWAIT);
  }
  size_t total = 0;
  for (size_t i = 0; i < count; ++i) {
    auto* to = static_cast<std::byte*>(vectors[i].iov_base);
    for (size_t left = vectors[i].iov_len; left > 0;) {
      size_t received = 0;
      Outcome outcome = tls_->read(to, left, &received);
      // The next call tells of an end that comes after bytes.
      if (outcome != Outcome::kDone) return total > 0 ? static_cast<ssize_t>(total) : failed(outcome);
      to += received;
      left -= received;
      total += received;
    }
  }
  return static_cast<ssize_t>(total);
}

ssize_t Transport::failed(Outcome outcome) {
  if (outcome == Outcome::kClosed) return errno = ECONNRESET, 0;
  errno = outcome == Outcome::kFailed ? EPROTO : EAGAIN;
  wants_room_ = outcome == Outcome::kWantWrite;
  return -1;
}

std::string Transport::reason(int error) const {
  return error == EPROTO && tls_ ? tls_->reason() : strerror(error);
}

}  // namespace mooncake_tcp
