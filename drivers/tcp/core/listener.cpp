#include "listener.hpp"

#include <sys/epoll.h>

#include <cerrno>

namespace mooncake_tcp {

namespace {
constexpr int kBacklog = 1024;
constexpr int kAcceptsPerTurn = 64;
constexpr uint64_t kPauseNs = 100'000'000;
}  // namespace

Status Listener::open() {
  SocketAddress address;
  Status resolved = resolve(options_.host, &address);
  if (!resolved.ok()) return resolved;
  for (uint32_t port = options_.port_min; port <= options_.port_max; ++port) {
    address.set_port(static_cast<uint16_t>(port));
    int error = 0;
    Status status = listen_on(address, &error);
    if (status.ok() || error != EADDRINUSE) return status;
  }
  std::string range = std::to_string(options_.port_min);
  if (options_.port_max != options_.port_min) range += ".." + std::to_string(options_.port_max);
  return {MC_IO, "every port of " + range + " on " + options_.host +
                     " is taken; free one, widen port_min and port_max, or leave them out for any free port"};
}

Status Listener::listen_on(const SocketAddress& address, int* error) {
  auto failed = [&](const char* what) {
    *error = errno;
    return os_error(std::string(what) + " " + address.text(), errno);
  };
  Descriptor socket(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
  if (!socket.valid()) return failed("cannot create a socket for");
  int on = 1;
  // A port that only holds connections in TIME_WAIT is free for us; one with a listener stays taken.
  setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (bind(socket.get(), address.raw(), address.length) != 0) return failed("cannot bind");
  if (listen(socket.get(), kBacklog) != 0) return failed("cannot listen on");
  SocketAddress bound;
  bound.length = sizeof(bound.storage);
  if (getsockname(socket.get(), bound.raw(), &bound.length) != 0) return failed("cannot learn the port of");
  bound_ = bound;
  socket_ = std::move(socket);
  return {};
}

void Listener::begin() {
  // The owner is the endpoint, which outlives its workers.
  token_ = workers_[0]->poller().watch(socket_.get(), EPOLLIN, this, nullptr);
}

void Listener::on_events(uint32_t) {
  for (int i = 0; i < kAcceptsPerTurn; ++i) {
    SocketAddress peer;
    peer.length = sizeof(peer.storage);
    Descriptor socket(accept4(socket_.get(), peer.raw(), &peer.length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.valid()) {
      if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
        // Nothing to accept with: look again in a moment instead of spinning on the ready listener.
        workers_[0]->poller().change(token_, socket_.get(), 0);
        workers_[0]->set_deadline(token_, now_ns() + kPauseNs);
        return;
      }
      if (errno == EAGAIN || errno == EWOULDBLOCK) return;
      continue;  // that connection ended before it was accepted
    }
    // Who comes next finds a place when these have said hello, or have been dropped for not doing so.
    if (counters_.strangers.load(std::memory_order_relaxed) >= options_.max_strangers) continue;
    SocketAddress own;
    own.length = sizeof(own.storage);
    bool known = getsockname(socket.get(), own.raw(), &own.length) == 0;
    tune_socket(socket.get(), options_, known && own.same_host_as(peer));
    Worker& worker = *workers_[next_worker_++ % workers_.size()];
    auto incoming = std::make_shared<Incoming>(worker, options_, nonce_, regions_, counters_, sessions_);
    auto handed_over = std::make_shared<Descriptor>(std::move(socket));
    worker.post([incoming, handed_over] { incoming->begin(std::move(*handed_over)); });
  }
}

void Listener::on_deadline() { workers_[0]->poller().change(token_, socket_.get(), EPOLLIN); }

void Listener::on_stop() {
  workers_[0]->poller().forget(token_, socket_.get());
  socket_.reset();
}

}  // namespace mooncake_tcp
