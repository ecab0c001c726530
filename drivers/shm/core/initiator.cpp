#include "initiator.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace mooncake::shm {
namespace {

// A listener whose backlog is full is asked again after this time.
constexpr uint64_t kRetryNs = 5'000'000;

Status peer_gone() {
  return failed(MC_UNREACHABLE, "the peer has closed its endpoint or its process has ended");
}

}  // namespace

std::shared_ptr<Connection> Initiator::connect(const Address& address) {
  auto connection = std::make_shared<Connection>();
  connection->address = address;
  {
    std::lock_guard lock(mutex_);
    connection->id = next_id_++;
    connections_[connection->id] = connection;
  }
  loop_.post([this, connection] { begin(connection); });
  return connection;
}

void Initiator::disconnect(const std::shared_ptr<Connection>& connection) {
  connection->closed.store(true, std::memory_order_release);
  lose(connection, failed(MC_CLOSED, "the connection was closed on this side"));
}

void Initiator::close() {
  std::vector<ConnectionPointer> all;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, connection] : connections_) all.push_back(connection);
  }
  for (const auto& connection : all) disconnect(connection);
}

std::shared_ptr<RemoteRegion> Initiator::import(const std::shared_ptr<Connection>& connection,
                                                uint64_t region_id, const Key& key) {
  std::lock_guard lock(mutex_);
  auto& known = connection->regions[{region_id, key}];
  if (known) return known;
  known = std::make_shared<RemoteRegion>();
  known->connection_id = connection->id;
  known->id = region_id;
  known->key = key;
  if (connection->state == Connection::State::kLost) known->refusal = connection->failure;
  if (connection->state == Connection::State::kReady) {
    loop_.post([this, connection, remote = known] { ask(connection, remote); });
  }  // else the welcome does it
  return known;
}

std::shared_ptr<const Access> Initiator::look_up(const Connection& connection, const RemoteRegion& remote,
                                                 Status& failure) {
  std::lock_guard lock(mutex_);
  failure = connection.state == Connection::State::kLost ? connection.failure : remote.refusal;
  return failure.ok() ? remote.access : nullptr;
}

void Initiator::park(const std::shared_ptr<Operation>& operation) {
  std::shared_ptr<const Access> access;
  Status failure;
  {
    std::lock_guard lock(mutex_);
    RemoteRegion& remote = *operation->remote;
    failure = operation->connection->state == Connection::State::kLost ? operation->connection->failure
                                                                       : remote.refusal;
    access = remote.access;
    if (failure.ok() && !access) {
      remote.waiting.push_back(operation);
      return;
    }
  }
  if (failure.ok()) {
    pool_.run(operation, std::move(access));
  } else {
    pool_.end(operation, failure);
  }
}

uint32_t Initiator::open_connections() const {
  std::lock_guard lock(mutex_);
  uint32_t open = 0;
  for (const auto& [id, connection] : connections_) open += connection->state != Connection::State::kLost;
  return open;
}

// ---------------------------------------------------------------------------------------------- the service
// thread

void Initiator::begin(const ConnectionPointer& connection) {
  uint64_t deadline = deadline_after(options_.answer_timeout_s);
  try_to_connect(connection, deadline);
  loop_.at(deadline, [this, weak = std::weak_ptr(connection)] {
    ConnectionPointer late = weak.lock();
    if (!late) return;
    {
      std::lock_guard lock(mutex_);
      if (late->state != Connection::State::kConnecting) return;
    }
    lose(late, failed(MC_UNREACHABLE, "the peer did not answer the hello in time (answer_timeout_s)"));
  });
}

void Initiator::try_to_connect(const ConnectionPointer& connection, uint64_t deadline_ns) {
  {
    std::lock_guard lock(mutex_);
    if (connection->state != Connection::State::kConnecting) return;
  }
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid())
    return lose(connection, system_failure(MC_IO, "cannot create a control socket", errno));
  sockaddr_un name;
  socklen_t length = socket_name(connection->address, name);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&name), length) != 0) {
    if ((errno == EAGAIN || errno == EINTR) && now_ns() < deadline_ns) {
      loop_.at(now_ns() + kRetryNs,
               [this, connection, deadline_ns] { try_to_connect(connection, deadline_ns); });
      return;
    }
    return lose(connection,
                system_failure(MC_UNREACHABLE, "no endpoint listens at the peer's address", errno));
  }
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    return lose(connection, system_failure(MC_IO, "cannot learn who listens at the peer's address", errno));
  }
  // Opened before the welcome, whose arrival then proves that the pid was not taken over by another process.
  UniqueFd pidfd = open_pidfd(peer.pid);
  // A forked child of a dead endpoint keeps its socket listening.
  if (!pidfd.valid() && peer.pid > 0 && errno == ESRCH) return lose(connection, peer_gone());
  connection->link = std::make_shared<Link>(std::move(socket), peer.pid, std::move(pidfd));
  greet(connection);
}

void Initiator::greet(const ConnectionPointer& connection) {
  auto on_socket = [this, connection](uint32_t events) { on_event(connection, events); };
  auto on_end = [this, connection](uint32_t) { lose(connection, peer_gone()); };
  const Link& link = *connection->link;
  bool watched = loop_.watch(link.channel.fd(), EPOLLIN | EPOLLRDHUP, on_socket);
  if (watched && link.pidfd.valid()) watched = loop_.watch(link.pidfd.get(), EPOLLIN, on_end);
  if (!watched) return lose(connection, system_failure(MC_IO, "cannot watch the control socket", errno));
  Message hello = make_message(MessageKind::kHello);
  std::memcpy(hello.secret, connection->address.initiator_secret, kSecretBytes);
  send(connection, hello);
}

void Initiator::on_event(const ConnectionPointer& connection, uint32_t epoll_events) {
  Channel& channel = connection->link->channel;
  if ((epoll_events & EPOLLOUT) != 0) {
    if (!channel.flush()) return lose(connection, peer_gone());
    if (!channel.congested()) loop_.change(channel.fd(), EPOLLIN | EPOLLRDHUP);
  }
  // Read before looking at the hang-up: a refusal is followed by one.
  for (;;) {
    Message message;
    UniqueFd passed;
    Channel::Received received = channel.receive(message, passed);
    if (received == Channel::Received::kNothing) return;
    if (received == Channel::Received::kEnd) return lose(connection, peer_gone());
    if (!on_message(connection, message, std::move(passed))) return;
  }
}

bool Initiator::on_message(const ConnectionPointer& connection, const Message& message, UniqueFd passed) {
  bool ready = connection->link->leases != nullptr;
  if (!ready && message.kind == MessageKind::kWelcome)
    return on_welcome(connection, message, std::move(passed));
  if (ready && message.kind == MessageKind::kGrant) {
    on_grant(connection, message, std::move(passed));
    return true;
  }
  if (ready && message.kind == MessageKind::kRevoked) {
    on_revoked(connection, message.region_id);
    return true;
  }
  lose(connection, failed(MC_UNREACHABLE, "the peer sent a message that does not belong here"));
  return false;
}

bool Initiator::on_welcome(const ConnectionPointer& connection, const Message& welcome, UniqueFd passed) {
  Status status = reason_of(welcome);
  if (status.ok() &&
      !equal_in_constant_time(welcome.secret, connection->address.target_secret, kSecretBytes)) {
    status = failed(MC_UNREACHABLE, "another process answers at the peer's address");
  }
  std::shared_ptr<LeasePage> leases;
  if (status.ok()) status = LeasePage::open(passed.get(), leases);
  if (!status.ok()) {
    lose(connection, status);
    return false;
  }
  std::vector<std::shared_ptr<RemoteRegion>> unasked;
  {
    std::lock_guard lock(mutex_);
    if (connection->state == Connection::State::kLost) return false;
    connection->link->leases = std::move(leases);
    connection->state = Connection::State::kReady;
    for (auto& [name, remote] : connection->regions) unasked.push_back(remote);
  }
  for (const auto& remote : unasked) ask(connection, remote);
  return true;
}

void Initiator::ask(const ConnectionPointer& connection, const std::shared_ptr<RemoteRegion>& remote) {
  uint64_t request = next_request_++;
  {
    std::lock_guard lock(mutex_);
    if (connection->state != Connection::State::kReady) return;
    connection->asked[request] = remote;
  }
  Message question = make_message(MessageKind::kAsk);
  question.request = request;
  question.region_id = remote->id;
  std::memcpy(question.secret, remote->key.data(), remote->key.size());
  send(connection, question);
  loop_.at(deadline_after(options_.answer_timeout_s), [this, weak = std::weak_ptr(connection), request] {
    ConnectionPointer late = weak.lock();
    if (!late) return;
    {
      std::lock_guard lock(mutex_);
      if (late->state != Connection::State::kReady || !late->asked.contains(request)) return;
    }
    lose(late, failed(MC_UNREACHABLE,
                      "the peer did not answer in time when asked for a region (answer_timeout_s)"));
  });
}

void Initiator::on_grant(const ConnectionPointer& connection, const Message& grant, UniqueFd passed) {
  std::shared_ptr<RemoteRegion> remote;
  {
    std::lock_guard lock(mutex_);
    auto found = connection->asked.find(grant.request);
    if (found == connection->asked.end()) return;
    remote = std::move(found->second);
    connection->asked.erase(found);
  }
  Status status = reason_of(grant);
  std::shared_ptr<const Access> access;
  if (status.ok()) status = Access::open(grant, passed, connection->link, access);
  if (!status.ok()) {
    // Who imports the region again asks again: the reason may have been a passing one.
    std::lock_guard lock(mutex_);
    connection->regions.erase({remote->id, remote->key});
  }
  settle(connection, remote, std::move(access), std::move(status));
}

void Initiator::on_revoked(const ConnectionPointer& connection, uint64_t region_id) {
  std::vector<std::shared_ptr<RemoteRegion>> withdrawn;
  {
    std::lock_guard lock(mutex_);
    auto& regions = connection->regions;
    for (auto next = regions.lower_bound({region_id, Key{}});
         next != regions.end() && next->first.first == region_id;) {
      withdrawn.push_back(next->second);
      next = regions.erase(next);
    }
  }
  // Letting go of the mapping gives the memory back to its owner's system.
  for (const auto& remote : withdrawn) {
    settle(connection, remote, nullptr, failed(MC_REFUSED, "the region was deregistered by its owner"));
  }
}

void Initiator::settle(const ConnectionPointer& connection, const std::shared_ptr<RemoteRegion>& remote,
                       std::shared_ptr<const Access> access, Status refusal) {
  std::vector<std::shared_ptr<Operation>> waiting;
  std::shared_ptr<const Access> dropped;
  {
    std::lock_guard lock(mutex_);
    if (connection->state == Connection::State::kLost)
      return;  // all is settled; an access would keep the link
    waiting.swap(remote->waiting);
    dropped = std::exchange(remote->access, access);
    remote->refusal = refusal;
  }
  for (const auto& operation : waiting) {
    if (access) {
      pool_.run(operation, access);
    } else {
      pool_.end(operation, refusal);
    }
  }
}

void Initiator::send(const ConnectionPointer& connection, const Message& message) {
  if (!connection->link) return;  // lost meanwhile
  Channel& channel = connection->link->channel;
  if (!channel.send(message)) return lose(connection, peer_gone());
  if (channel.congested()) loop_.change(channel.fd(), EPOLLIN | EPOLLRDHUP | EPOLLOUT);
}

// --------------------------------------------------------------------------------------------------------
// any thread

void Initiator::lose(const std::shared_ptr<Connection>& connection, const Status& failure) {
  std::vector<std::shared_ptr<const Access>> dropped;  // unmapped outside the lock
  {
    std::lock_guard lock(mutex_);
    if (connection->state == Connection::State::kLost) {
      if (connection->closed.load()) connections_.erase(connection->id);
      return;
    }
    connection->state = Connection::State::kLost;
    connection->failure = failure;
    for (auto& [name, remote] : connection->regions) {
      dropped.push_back(std::move(remote->access));
      remote->access.reset();
      remote->refusal = failure;
      remote->waiting.clear();
    }
    connection->regions.clear();
    connection->asked.clear();
    if (connection->closed.load()) connections_.erase(connection->id);
  }
  pool_.end_connection(*connection, failure);
  loop_.post([this, connection] {
    if (!connection->link) return;
    loop_.forget(connection->link->channel.fd());
    if (connection->link->pidfd.valid()) loop_.forget(connection->link->pidfd.get());
    connection->link.reset();  // copies that are being made keep it until they are over
  });
}

}  // namespace mooncake::shm
