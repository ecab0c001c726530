#include "target.hpp"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>

namespace template_driver {

unsigned fill_socket_address(const Address& address, sockaddr_un* out) {
  *out = {};
  out->sun_family = AF_UNIX;
  // sun_path[0] stays zero, which makes the name abstract.
  std::memcpy(out->sun_path + 1, address.data(), address.size());
  return static_cast<unsigned>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
}

Status Target::listen() {
  if (getrandom(address_.data(), address_.size(), 0) < 0) return {MC_IO, "the kernel gives no random bytes"};
  listener_ = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un name;
  unsigned length = fill_socket_address(address_, &name);
  if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&name), length) != 0 ||
      ::listen(listener_, 128) != 0) {
    return {MC_IO, std::string("cannot listen: ") + std::strerror(errno)};
  }
  acceptor_ = std::thread([this] { accept_peers(); });
  return {};
}

Target::~Target() {
  stopping_ = true;
  if (listener_ >= 0) shutdown(listener_, SHUT_RDWR);  // wakes accept()
  if (acceptor_.joinable()) acceptor_.join();
  for (Peer& peer : peers_) shutdown(peer.socket, SHUT_RDWR);
  for (Peer& peer : peers_) {
    peer.thread.join();
    close(peer.socket);
  }
  if (listener_ >= 0) close(listener_);
}

void Target::accept_peers() {
  while (!stopping_) {
    int socket = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    if (socket < 0) {
      // Out of descriptors, most likely: do not spin until some are free.
      if (!stopping_) std::this_thread::sleep_for(std::chrono::milliseconds(10));
      continue;
    }
    std::lock_guard lock(mutex_);
    peers_.remove_if([](Peer& peer) {
      if (!peer.done) return false;
      peer.thread.join();
      close(peer.socket);
      return true;
    });
    Peer& peer = peers_.emplace_back();
    peer.socket = socket;
    peer.thread = std::thread([this, &peer] { serve(peer); });
  }
}

void Target::serve(Peer& peer) {
  Request request;
  bool entered = false;
  while (receive_all(peer.socket, &request, sizeof request, &peer.ended) && request.magic == kMagic) {
    if (!entered && !enter(peer, request.session)) break;
    entered = true;
    if (!serve_one(peer, request)) break;
  }
  shutdown(peer.socket, SHUT_RDWR);
  std::lock_guard lock(mutex_);
  peer.done = true;  // the next accept, or the destructor, cleans up
  gone_.notify_all();
}

// The initiator comes with a new socket after its last one failed: what that one still holds must not land on
// what this one brings, so it ends first.
bool Target::enter(Peer& peer, uint64_t session) {
  constexpr uint64_t kPatienceNs = 5'000'000'000;
  {
    std::lock_guard lock(mutex_);
    peer.session = session;
  }
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return end_session(session, &peer, static_cast<uint64_t>(now.count()) + kPatienceNs);
}

bool Target::end_session(uint64_t session, const Peer* except, uint64_t deadline_ns) {
  constexpr uint64_t kFarthestNs = uint64_t{1} << 62;  // the clock's count is signed
  std::chrono::steady_clock::time_point until(std::chrono::nanoseconds(std::min(deadline_ns, kFarthestNs)));
  auto serves = [&](const Peer& peer) { return &peer != except && peer.session == session && !peer.done; };
  std::unique_lock lock(mutex_);
  for (Peer& peer : peers_) {
    if (!serves(peer)) continue;
    peer.ended = true;
    shutdown(peer.socket, SHUT_RDWR);
  }
  // One that comes meanwhile may be served: `ended` was not set for it, and it ends the others by itself.
  return gone_.wait_until(lock, until, [&] {
    return std::none_of(peers_.begin(), peers_.end(),
                        [&](const Peer& peer) { return serves(peer) && peer.ended; });
  });
}

bool Target::serve_one(Peer& peer, const Request& request) {
  int socket = peer.socket;
  Status status;
  Regions::Use use = regions_.admit(request, &status);
  if (!use) ++refused_;
  Reply reply = make_reply(status);
  if (!send_all(socket, &reply, sizeof reply)) return false;
  if (!use) return true;
  if (request.opcode == MC_READ) return send_all(socket, use.at(request.offset), request.length);
  if (!receive_all(socket, use.at(request.offset), request.length, &peer.ended)) return false;
  return send_all(socket, &reply, sizeof reply);
}

}  // namespace template_driver
