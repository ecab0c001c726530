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
// An answer like "no descriptor left" may be another one so much later.
constexpr uint64_t kAskAgainNs = 1'000'000'000;
// How soon to look again whether submit() has left a region that is to be let go of.
constexpr uint64_t kLetGoNs = 1'000'000;
// How much is entered into the page tables at a time, between other duties of the service thread.
constexpr size_t kPopulateBytes = 4 << 20;

Status peer_gone() {
  return failed(MC_UNREACHABLE, "the peer has closed its endpoint or its process has ended");
}

Status closed_here() { return failed(MC_CLOSED, "the connection was closed on this side"); }

}  // namespace

std::shared_ptr<Connection> Initiator::connect(const Address& address) {
  auto connection = std::make_shared<Connection>();
  connection->address = address;
  {
    std::lock_guard lock(mutex_);
    connection->id = next_id_++;
    connections_[connection->id] = connection;
  }
  loop_.post([this, attempt = Attempt{connection, 1}] { begin(attempt); });
  return connection;
}

void Initiator::disconnect(const std::shared_ptr<Connection>& connection) {
  end({connection, 0}, Connection::State::kClosed, closed_here());
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
  // Who imports a refused region again asks again.
  if (known && known->state != RemoteRegion::State::kRefused) return known;
  known = std::make_shared<RemoteRegion>();
  known->connection_id = connection->id;
  known->id = region_id;
  known->key = key;
  if (connection->state != Connection::State::kLost) want(connection, known);
  return known;
}

void Initiator::want(const ConnectionPointer& connection, const RemotePointer& remote) {
  remote->state = RemoteRegion::State::kAsked;
  Attempt attempt{connection, connection->attempt};
  switch (connection->state) {
    case Connection::State::kReady:
      loop_.post([this, attempt, remote] { ask(attempt, remote); });
      return;
    case Connection::State::kLost:
      connection->state = Connection::State::kConnecting;
      attempt.number = ++connection->attempt;
      loop_.post([this, attempt] { begin(attempt); });
      [[fallthrough]];
    case Connection::State::kConnecting:
    case Connection::State::kClosed:
      connection->unasked.push_back(remote);
  }
}

void Initiator::place(const std::shared_ptr<Job>& job) {
  std::shared_ptr<const Access> access;
  Status failure;
  {
    std::lock_guard lock(mutex_);
    RemoteRegion& remote = *job->remote;
    bool passing = remote.state == RemoteRegion::State::kRefused && remote.refusal.code != MC_REFUSED &&
                   now_ns() >= remote.ask_again_ns;
    if (passing) remote.state = RemoteRegion::State::kUnasked;
    if (job->connection->state == Connection::State::kClosed) {
      failure = closed_here();
    } else if (remote.state == RemoteRegion::State::kRefused) {
      failure = remote.refusal;
    } else if (remote.state == RemoteRegion::State::kOpen) {
      access = remote.access;
    } else {
      remote.waiting.push_back(job);
      if (remote.state == RemoteRegion::State::kUnasked) want(job->connection, job->remote);
      return;
    }
  }
  if (failure.ok()) {
    run(job, std::move(access));
  } else {
    pool_.end(job, failure);
  }
}

void Initiator::run(const std::shared_ptr<Job>& job, std::shared_ptr<const Access> access) {
  job->access = std::move(access);
  pool_.run(job);
}

uint32_t Initiator::open_connections() const {
  std::lock_guard lock(mutex_);
  uint32_t open = 0;
  for (const auto& [id, connection] : connections_) open += connection->state != Connection::State::kLost;
  return open;
}

bool Initiator::current(const Attempt& attempt) const {
  bool going = attempt.connection->state == Connection::State::kConnecting ||
               attempt.connection->state == Connection::State::kReady;
  return going && attempt.connection->attempt == attempt.number;
}

// ---------------------------------------------------------------------------------------------- the service
// thread

void Initiator::begin(const Attempt& attempt) {
  uint64_t deadline = deadline_after(options_.answer_timeout_s);
  try_to_connect(attempt, deadline);
  loop_.at(deadline, [this, weak = std::weak_ptr(attempt.connection), number = attempt.number] {
    Attempt late{weak.lock(), number};
    if (!late.connection) return;
    {
      std::lock_guard lock(mutex_);
      if (!current(late) || late.connection->state != Connection::State::kConnecting) return;
    }
    lose(late, failed(MC_UNREACHABLE, "the peer did not answer the hello in time (answer_timeout_s)"));
  });
}

void Initiator::try_to_connect(const Attempt& attempt, uint64_t deadline_ns) {
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
  }
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return lose(attempt, system_failure(MC_IO, "cannot create a control socket", errno));
  sockaddr_un name;
  socklen_t length = socket_name(attempt.connection->address, name);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&name), length) != 0) {
    if ((errno == EAGAIN || errno == EINTR) && now_ns() < deadline_ns) {
      loop_.at(now_ns() + kRetryNs, [this, attempt, deadline_ns] { try_to_connect(attempt, deadline_ns); });
      return;
    }
    return lose(attempt, system_failure(MC_UNREACHABLE, "no endpoint listens at the peer's address", errno));
  }
  ucred peer{};
  socklen_t size = sizeof peer;
  if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0)
    return lose(attempt, system_failure(MC_IO, "cannot learn who listens at the peer's address", errno));
  // Opened before the welcome, whose arrival then proves that the pid was not taken over by another process.
  UniqueFd pidfd = open_pidfd(peer.pid);
  // A forked child of a dead endpoint keeps its socket listening.
  if (!pidfd.valid() && peer.pid > 0 && errno == ESRCH) return lose(attempt, peer_gone());
  greet(attempt, std::make_shared<Link>(std::move(socket), peer.pid, std::move(pidfd)));
}

void Initiator::greet(const Attempt& attempt, std::shared_ptr<Link> link) {
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
    attempt.connection->link = link;  // from here on lose() forgets its descriptors
  }
  auto on_socket = [this, attempt, link](uint32_t events) { on_event(attempt, *link, events); };
  auto on_end = [this, attempt](uint32_t) { lose(attempt, peer_gone()); };
  bool watched = loop_.watch(link->channel.fd(), EPOLLIN | EPOLLRDHUP, on_socket);
  if (watched && link->pidfd.valid()) watched = loop_.watch(link->pidfd.get(), EPOLLIN, on_end);
  if (!watched) return lose(attempt, system_failure(MC_IO, "cannot watch the control socket", errno));
  Message hello = make_message(MessageKind::kHello);
  std::memcpy(hello.secret, attempt.connection->address.initiator_secret, kSecretBytes);
  send(attempt, *link, hello);
}

void Initiator::on_event(const Attempt& attempt, Link& link, uint32_t epoll_events) {
  Channel& channel = link.channel;
  if ((epoll_events & EPOLLOUT) != 0) {
    if (!channel.flush()) return lose(attempt, peer_gone());
    if (!channel.congested()) loop_.change(channel.fd(), EPOLLIN | EPOLLRDHUP);
  }
  // Read before looking at the hang-up: a refusal is followed by one.
  for (;;) {
    Message message;
    UniqueFd passed;
    Channel::Received received = channel.receive(message, passed);
    if (received == Channel::Received::kNothing) return;
    if (received == Channel::Received::kEnd) return lose(attempt, peer_gone());
    if (received == Channel::Received::kGarbage)
      return lose(attempt, failed(MC_UNREACHABLE, "the peer's shm driver is of another version"));
    if (!on_message(attempt, link, message, std::move(passed))) return;
  }
}

bool Initiator::on_message(const Attempt& attempt, Link& link, const Message& message, UniqueFd passed) {
  bool ready = link.leases != nullptr;
  if (!ready && message.kind == MessageKind::kDriver) return on_life(attempt, link, std::move(passed));
  if (!ready && message.kind == MessageKind::kWelcome)
    return on_welcome(attempt, link, message, std::move(passed));
  if (ready && message.kind == MessageKind::kGrant) {
    on_grant(attempt, message, std::move(passed));
    return true;
  }
  if (ready && message.kind == MessageKind::kRevoke) {
    on_revoked(attempt, message);
    return true;
  }
  lose(attempt, failed(MC_UNREACHABLE, "the peer sent a message that does not belong here"));
  return false;
}

bool Initiator::on_life(const Attempt& attempt, Link& link, UniqueFd passed) {
  std::shared_ptr<LifeSign> life;
  // Without it the socket tells as much, at the price of a system call for each look.
  if (!passed.valid()) return true;
  if (Status status = LifeSign::open(passed.get(), life); !status.ok()) {
    lose(attempt, status);
    return false;
  }
  link.life = std::move(life);
  return true;
}

bool Initiator::on_welcome(const Attempt& attempt, Link& link, const Message& welcome, UniqueFd passed) {
  Status status = reason_of(welcome);
  if (status.ok() &&
      !equal_in_constant_time(welcome.secret, attempt.connection->address.target_secret, kSecretBytes)) {
    status = failed(MC_UNREACHABLE, "another process answers at the peer's address");
  }
  std::shared_ptr<LeasePage> leases;
  if (status.ok() && !passed.valid()) {
    status =
        failed(MC_UNREACHABLE, "the peer's lease page did not arrive (is the limit of open files reached?)");
  }
  if (status.ok()) status = LeasePage::open(passed.get(), leases);
  if (!status.ok()) {
    lose(attempt, status);
    return false;
  }
  std::vector<RemotePointer> unasked;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return false;
    link.leases = std::move(leases);
    attempt.connection->state = Connection::State::kReady;
    unasked.swap(attempt.connection->unasked);
  }
  for (const auto& remote : unasked) ask(attempt, remote);
  return true;
}

void Initiator::ask(const Attempt& attempt, const RemotePointer& remote) {
  uint64_t request = next_request_++;
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
    attempt.connection->asked[request] = remote;
    link = attempt.connection->link;
  }
  Message question = make_message(MessageKind::kAsk);
  question.request = request;
  question.region_id = remote->id;
  std::memcpy(question.secret, remote->key.data(), remote->key.size());
  send(attempt, *link, question);
  loop_.at(deadline_after(options_.answer_timeout_s),
           [this, weak = std::weak_ptr(attempt.connection), number = attempt.number, request] {
             Attempt late{weak.lock(), number};
             if (!late.connection) return;
             {
               std::lock_guard lock(mutex_);
               if (!current(late) || !late.connection->asked.contains(request)) return;
             }
             lose(late, failed(MC_UNREACHABLE,
                               "the peer did not answer in time when asked for a region (answer_timeout_s)"));
           });
}

void Initiator::on_grant(const Attempt& attempt, const Message& grant, UniqueFd passed) {
  RemotePointer remote;
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
    auto found = attempt.connection->asked.find(grant.request);
    if (found == attempt.connection->asked.end()) return;
    remote = std::move(found->second);
    attempt.connection->asked.erase(found);
    link = attempt.connection->link;
  }
  Status status = reason_of(grant);
  std::shared_ptr<const Access> access;
  if (status.ok()) status = Access::open(grant, passed, link, access);
  settle(attempt, remote, access, status);
  if (access && access->mapping()) populate(access->mapping(), 0);
}

void Initiator::populate(const std::shared_ptr<Mapping>& mapping, size_t from) {
  size_t next = mapping->populate(from, kPopulateBytes);
  if (next >= mapping->mapped_bytes()) return;
  loop_.post([this, weak = std::weak_ptr(mapping), next] {
    if (auto still = weak.lock()) populate(still, next);
  });
}

void Initiator::on_revoked(const Attempt& attempt, const Message& notice) {
  Key key;
  std::memcpy(key.data(), notice.secret, key.size());
  RemotePointer withdrawn;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
    auto found = attempt.connection->regions.find({notice.region_id, key});
    if (found == attempt.connection->regions.end()) return;
    withdrawn = std::move(found->second);
    attempt.connection->regions.erase(found);
  }
  // Letting go of the mapping gives the memory back to its owner's system.
  settle(attempt, withdrawn, nullptr,
         failed(MC_REFUSED, "the region was deregistered or its key revoked by its owner"));
}

void Initiator::send(const Attempt& attempt, Link& link, const Message& message) {
  Channel& channel = link.channel;
  if (!channel.send(message)) return lose(attempt, peer_gone());
  if (channel.congested()) loop_.change(channel.fd(), EPOLLIN | EPOLLRDHUP | EPOLLOUT);
}

void Initiator::finish_letting_go(std::vector<LetGo> all) {
  std::erase_if(all,
                [](const LetGo& item) { return item.remote->users.load(std::memory_order_seq_cst) == 0; });
  if (all.empty()) return;
  auto again = std::make_shared<std::vector<LetGo>>(std::move(all));  // a std::function must be copyable
  loop_.at(now_ns() + kLetGoNs, [this, again] { finish_letting_go(std::move(*again)); });
}

// --------------------------------------------------------------------------------------------------------
// any thread

void Initiator::settle(const Attempt& attempt, const RemotePointer& remote,
                       std::shared_ptr<const Access> access, const Status& refusal) {
  std::vector<std::shared_ptr<Job>> waiting;
  std::vector<LetGo> dropped;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;  // all is settled; an access would keep the link
    waiting.swap(remote->waiting);
    shut_region(remote, dropped);
    remote->state = access ? RemoteRegion::State::kOpen : RemoteRegion::State::kRefused;
    remote->refusal = refusal;
    remote->ask_again_ns = now_ns() + kAskAgainNs;
    remote->access = access;
    remote->open.store(access.get(), std::memory_order_seq_cst);
  }
  let_go(std::move(dropped));
  for (const auto& job : waiting) {
    if (access) {
      run(job, access);
    } else {
      pool_.end(job, refusal);
    }
  }
}

void Initiator::shut_region(const RemotePointer& remote, std::vector<LetGo>& all) {
  remote->open.store(nullptr, std::memory_order_seq_cst);
  if (remote->access) all.push_back({remote, std::exchange(remote->access, nullptr)});
  if (remote->state != RemoteRegion::State::kRefused) remote->state = RemoteRegion::State::kUnasked;
}

void Initiator::let_go(std::vector<LetGo> all) {
  if (all.empty()) return;
  auto shared = std::make_shared<std::vector<LetGo>>(std::move(all));
  loop_.post([this, shared] { finish_letting_go(std::move(*shared)); });
}

void Initiator::lose(const Attempt& attempt, const Status& failure) {
  end(attempt, Connection::State::kLost, failure);
}

void Initiator::end(const Attempt& attempt, Connection::State state, const Status& failure) {
  const ConnectionPointer& connection = attempt.connection;
  std::vector<LetGo> dropped;
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(mutex_);
    bool meant = attempt.number == 0 ? connection->state != Connection::State::kClosed : current(attempt);
    if (!meant) return;
    connection->state = state;
    link = std::move(connection->link);
    connection->link.reset();
    auto shut = [&](const RemotePointer& remote) {
      shut_region(remote, dropped);
      remote->waiting.clear();  // the pool ends them below
    };
    for (auto& [name, remote] : connection->regions) shut(remote);
    for (auto& remote : connection->unasked) shut(remote);
    for (auto& [request, remote] : connection->asked) shut(remote);
    connection->unasked.clear();
    connection->asked.clear();
    if (state == Connection::State::kClosed) {
      connection->regions.clear();
      connections_.erase(connection->id);
    }
  }
  pool_.end_connection(connection.get(), failure);
  let_go(std::move(dropped));
  if (!link) return;
  loop_.post([this, link] {  // copies that are being made keep it until they are over
    loop_.forget(link->channel.fd());
    if (link->pidfd.valid()) loop_.forget(link->pidfd.get());
  });
}

}  // namespace mooncake::shm
