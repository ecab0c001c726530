#include "target.hpp"

#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <system_error>
#include <utility>

namespace template_driver {

unsigned fill_socket_address(const Address& address, sockaddr_un* out) {
  *out = {};
  out->sun_family = AF_UNIX;
  // sun_path[0] stays zero, which makes the name abstract.
  std::memcpy(out->sun_path + 1, address.data(), address.size());
  return static_cast<unsigned>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
}

Status Target::listen() {
  Status status = mooncake::driver::fill_random(address_.data(), address_.size());
  if (!status.ok()) return status;
  listener_.reset(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un name;
  unsigned length = fill_socket_address(address_, &name);
  if (!listener_.valid() || bind(listener_.get(), reinterpret_cast<sockaddr*>(&name), length) != 0 ||
      ::listen(listener_.get(), 128) != 0)
    return mooncake::driver::system_failure(MC_IO, "cannot listen", errno);
  acceptor_ = std::thread([this] { accept_peers(); });
  return {};
}

Target::~Target() {
  stopping_ = true;
  if (listener_.valid()) shutdown(listener_.get(), SHUT_RDWR);  // wakes accept()
  if (acceptor_.joinable()) acceptor_.join();
  for (Peer& peer : peers_) shutdown(peer.socket.get(), SHUT_RDWR);
  for (Peer& peer : peers_) peer.thread.join();
}

void Target::accept_peers() {
  mooncake::driver::prepare_thread("mc-accept");
  while (!stopping_) {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    bool served = socket.valid() && begin(std::move(socket));
    // Out of descriptors or threads, most likely: do not spin until some are free.
    if (!served && !stopping_) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// False: there is no thread to serve the peer, who is hung up on and may try again.
bool Target::begin(UniqueFd socket) {
  std::lock_guard lock(mutex_);
  peers_.remove_if([](Peer& peer) {
    if (!peer.done) return false;
    peer.thread.join();
    return true;
  });
  Peer& peer = peers_.emplace_back();
  peer.socket = std::move(socket);
  try {
    peer.thread = std::thread([this, &peer] { serve(peer); });
    return true;
  } catch (const std::system_error&) {
    peers_.pop_back();
    return false;
  }
}

void Target::serve(Peer& peer) {
  mooncake::driver::prepare_thread("mc-serve");
  Request request;
  bool entered = false;
  while (receive_all(peer.socket.get(), &request, sizeof request, &peer.ended) && request.magic == kMagic) {
    if (!entered && !enter(peer, request.session)) break;
    entered = true;
    if (!serve_one(peer, request)) break;
  }
  shutdown(peer.socket.get(), SHUT_RDWR);
  std::lock_guard lock(mutex_);
  peer.done = true;  // the next accept, or the destructor, cleans up
  gone_.notify_all();
}

// The initiator comes with a new socket after its last one failed: what that one still holds must not land on
// what this one brings, so it ends first.
bool Target::enter(Peer& peer, uint64_t session) {
  constexpr double kPatienceS = 5.0;
  {
    std::lock_guard lock(mutex_);
    peer.session = session;
  }
  return end_session(session, &peer, mooncake::driver::deadline_after(kPatienceS));
}

bool Target::end_session(uint64_t session, const Peer* except, uint64_t deadline_ns) {
  auto serves = [&](const Peer& peer) { return &peer != except && peer.session == session && !peer.done; };
  std::unique_lock lock(mutex_);
  for (Peer& peer : peers_) {
    if (!serves(peer)) continue;
    peer.ended = true;
    shutdown(peer.socket.get(), SHUT_RDWR);
  }
  // One that comes meanwhile may be served: `ended` was not set for it, and it ends the others by itself.
  return gone_.wait_until(lock, mooncake::driver::time_point(deadline_ns), [&] {
    return std::none_of(peers_.begin(), peers_.end(),
                        [&](const Peer& peer) { return serves(peer) && peer.ended; });
  });
}

bool Target::serve_one(Peer& peer, const Request& request) {
  int socket = peer.socket.get();
  Regions::Use use;
  Status status = regions_.admit(request, &use);
  if (!status.ok()) ++refused_;
  Reply reply = make_reply(status);
  if (!send_all(socket, &reply, sizeof reply)) return false;
  if (!status.ok()) return true;
  if (request.opcode == MC_READ) return send_all(socket, use.at(request.offset), request.length);
  if (!receive_all(socket, use.at(request.offset), request.length, &peer.ended)) return false;
  return send_all(socket, &reply, sizeof reply);
}

}  // namespace template_driver
