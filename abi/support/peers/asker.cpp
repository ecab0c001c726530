#include "asker.hpp"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace mooncake::driver {
namespace {

// A listener whose backlog is full is asked again after this time.
constexpr uint64_t kRetryNs = 5'000'000;
// A refusal that is none of the key (no descriptor left, say) may be another answer so much later.
constexpr uint64_t kAskAgainNs = 1'000'000'000;
// How soon to look again whether what was revoked is still used.
constexpr uint64_t kLetGoNs = 200'000;
constexpr size_t kMostParts = 4096;

Status peer_gone() {
  return failed(MC_UNREACHABLE, "the peer has closed its endpoint or its process has ended");
}
Status closed_here() { return failed(MC_CLOSED, "the connection was closed on this side"); }
Status withdrawn() {
  return failed(MC_REFUSED, "the region was deregistered or its key revoked by its owner");
}

}  // namespace

Link::~Link() {
  if (generation == fork_generation()) (void)channel.send(make_message(MessageKind::kBye));
}

Status Link::check_alive() const {
  if (lost.load(std::memory_order_acquire)) return peer_gone();
  if (!pidfd.valid()) return {};
  pollfd end{pidfd.get(), POLLIN, 0};
  return ::poll(&end, 1, 0) == 1 ? peer_gone() : Status{};
}

Status Opened::check(mc_opcode opcode, uint64_t offset, uint64_t count) const {
  if ((access & (opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE)) == 0)
    return failed(MC_REFUSED, opcode == MC_READ ? "the key allows only writing to the region"
                                                : "the key allows only reading from the region");
  if (lease != nullptr && lease->token() != token) return withdrawn();
  if (offset <= length && count <= length - offset) return {};
  return failed(MC_REFUSED,
                "the range is outside the region, which has " + std::to_string(length) + " bytes");
}

Status Asker::reachable(const Address& address) const {
  if (same_host(own_, address) || (hooks_.over_tcp && address.port != 0)) return {};
  bool apart = same_boot(own_, address);
  return failed(apart ? MC_UNREACHABLE : MC_UNSUPPORTED,
                std::string("the peer is ") + (apart ? "in another network namespace" : "at another host") +
                    ", and the " + own_.driver + " driver of one of the two does not cross hosts");
}

std::shared_ptr<Connection> Asker::connect(const Address& address) {
  auto connection = std::make_shared<Connection>();
  connection->address = address;
  {
    std::lock_guard lock(mutex_);
    connections_.push_back(connection);
  }
  loop_.post([this, attempt = Attempt{connection, 1}] { begin(attempt); });
  return connection;
}

void Asker::disconnect(const ConnectionPointer& connection) {
  end({connection, 0}, Connection::State::kClosed, closed_here());
}

void Asker::close() {
  std::vector<ConnectionPointer> all;
  {
    std::lock_guard lock(mutex_);
    all = connections_;
  }
  for (const auto& connection : all) disconnect(connection);
}

std::shared_ptr<Remote> Asker::import(const ConnectionPointer& connection, uint64_t region_id,
                                      const Key& key) {
  std::lock_guard lock(mutex_);
  auto& known = connection->remotes[{region_id, key}];
  // Who imports a refused region again asks again.
  if (known && known->state != Remote::State::kRefused) return known;
  known = std::make_shared<Remote>();
  known->connection = connection;
  known->id = region_id;
  known->key = key;
  if (connection->state != Connection::State::kLost) want(connection, known);
  return known;
}

void Asker::want(const ConnectionPointer& connection, const RemotePointer& remote) {
  remote->state = Remote::State::kAsked;
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

std::shared_ptr<Opened> Asker::opened(const RemotePointer& remote) {
  std::lock_guard lock(mutex_);
  ConnectionPointer connection = remote->connection.lock();
  bool open =
      connection && connection->state != Connection::State::kClosed && remote->state == Remote::State::kOpen;
  return open ? remote->opened : nullptr;
}

std::shared_ptr<Opened> Asker::use(const RemotePointer& remote, Status& status, uint64_t cookie,
                                   std::function<void(const std::shared_ptr<Opened>&, const Status&)> later) {
  std::lock_guard lock(mutex_);
  ConnectionPointer connection = remote->connection.lock();
  bool passing = remote->state == Remote::State::kRefused && remote->refusal.code != MC_REFUSED &&
                 now_ns() >= remote->ask_again_ns;
  if (passing) remote->state = Remote::State::kUnasked;
  if (!connection || connection->state == Connection::State::kClosed) {
    status = closed_here();
  } else if (remote->state == Remote::State::kRefused) {
    status = remote->refusal;
  } else if (remote->state == Remote::State::kOpen) {
    status = {};
    return remote->opened;
  } else {
    status = failed(MC_AGAIN, "the peer has been asked for the region and has not answered yet");
    if (later) remote->waiting.emplace_back(cookie, std::move(later));
    if (remote->state == Remote::State::kUnasked) want(connection, remote);
  }
  return nullptr;
}

void Asker::forget(uint64_t cookie, const Status& why) {
  std::vector<Remote::Waiting> found;
  {
    std::lock_guard lock(mutex_);
    for (const auto& connection : connections_) {
      for (auto& [name, remote] : connection->remotes) {
        std::erase_if(remote->waiting, [&](Remote::Waiting& item) {
          if (item.first != cookie) return false;
          found.push_back(std::move(item));
          return true;
        });
      }
    }
  }
  for (auto& item : found) item.second(nullptr, why);
}

uint32_t Asker::open_connections() const {
  std::lock_guard lock(mutex_);
  uint32_t open = 0;
  for (const auto& connection : connections_) open += connection->state != Connection::State::kLost;
  return open;
}

bool Asker::current(const Attempt& attempt) const {
  bool going = attempt.connection->state == Connection::State::kConnecting ||
               attempt.connection->state == Connection::State::kReady;
  return going && attempt.connection->attempt == attempt.number;
}

// ---------------------------------------------------------------------------------------------- the service
// thread

void Asker::begin(const Attempt& attempt) {
  uint64_t deadline = deadline_after(answer_timeout_s_);
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

UniqueFd Asker::open_socket(const Address& address, Status& status, bool& again) const {
  bool near = same_host(own_, address);
  again = false;
  sockaddr_storage at{};
  socklen_t length =
      near ? socket_name(address, reinterpret_cast<sockaddr_un&>(at)) : socket_address(address, at);
  int type = near ? SOCK_SEQPACKET : SOCK_STREAM;
  UniqueFd socket(::socket(at.ss_family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) {
    status = system_failure(MC_IO, "cannot create a control socket", errno);
    return {};
  }
  if (!near) {
    int on = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  }
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&at), length) == 0 || errno == EINPROGRESS)
    return socket;
  again = errno == EAGAIN || errno == EINTR;
  status = system_failure(MC_UNREACHABLE, "no endpoint listens at the peer's address", errno);
  return {};
}

void Asker::try_to_connect(const Attempt& attempt, uint64_t deadline_ns) {
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
  }
  const Address& address = attempt.connection->address;
  Status status;
  bool again = false;
  UniqueFd socket = open_socket(address, status, again);
  if (!socket.valid() && again && now_ns() < deadline_ns) {
    loop_.at(now_ns() + kRetryNs, [this, attempt, deadline_ns] { try_to_connect(attempt, deadline_ns); });
    return;
  }
  if (!socket.valid()) return lose(attempt, status);
  PeerInfo peer;
  UniqueFd pidfd;
  if (same_host(own_, address)) {
    ucred who{};
    socklen_t size = sizeof who;
    if (getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) != 0)
      return lose(attempt, system_failure(MC_IO, "cannot learn who listens at the peer's address", errno));
    // Opened before the welcome, whose arrival then proves that the pid was not taken over by another
    // process.
    pidfd = open_pidfd(who.pid);
    // A forked child of a dead endpoint keeps its socket listening.
    if (!pidfd.valid() && who.pid > 0 && errno == ESRCH) return lose(attempt, peer_gone());
    peer = {who.pid, who.pid == getpid(), true};
  }
  greet(attempt, std::make_shared<Link>(std::move(socket), peer, std::move(pidfd)));
}

void Asker::greet(const Attempt& attempt, const std::shared_ptr<Link>& link) {
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
    attempt.connection->link = link;  // from here on end() forgets its descriptors
  }
  auto on_socket = [this, attempt, link](uint32_t events) { on_event(attempt, link, events); };
  auto on_end = [this, attempt](uint32_t) { lose(attempt, peer_gone()); };
  uint32_t events = EPOLLIN | EPOLLRDHUP | (link->peer.same_host ? 0u : EPOLLOUT);
  bool watched = loop_.watch(link->channel.fd(), events, on_socket);
  if (watched && link->pidfd.valid()) watched = loop_.watch(link->pidfd.get(), EPOLLIN, on_end);
  if (!watched) return lose(attempt, system_failure(MC_IO, "cannot watch the control socket", errno));
  Message hello = make_message(MessageKind::kHello);
  std::memcpy(hello.secret, attempt.connection->address.initiator_secret, kSecretBytes);
  send(link, hello);
}

void Asker::on_event(const Attempt& attempt, const std::shared_ptr<Link>& link, uint32_t epoll_events) {
  Channel& channel = link->channel;
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
      return lose(attempt, failed(MC_UNREACHABLE, "the peer's driver is of another version"));
    if (!on_message(attempt, link, message, std::move(passed))) return;
  }
}

bool Asker::on_message(const Attempt& attempt, const std::shared_ptr<Link>& link, Message& message,
                       UniqueFd passed) {
  bool ready;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return false;
    ready = attempt.connection->state == Connection::State::kReady;
  }
  if (!ready && message.kind == MessageKind::kWelcome) return on_welcome(attempt, link, message, passed);
  if (ready) {
    switch (message.kind) {
      case MessageKind::kPart:
        on_part(attempt, message, std::move(passed));
        return true;
      case MessageKind::kGrant:
        on_grant(attempt, link, message);
        return true;
      case MessageKind::kRevoke:
        on_revoke(attempt, message.grant);
        return true;
      case MessageKind::kDriver:
        if (hooks_.on_message && hooks_.on_message(link, message, std::move(passed))) return true;
        break;
      default:
        break;
    }
  }
  lose(attempt, failed(MC_UNREACHABLE, "the peer sent a message that does not belong here"));
  return false;
}

bool Asker::on_welcome(const Attempt& attempt, const std::shared_ptr<Link>& link, const Message& welcome,
                       const UniqueFd& passed) {
  Status status = reason_of(welcome);
  if (status.ok() &&
      !equal_in_constant_time(welcome.secret, attempt.connection->address.target_secret, kSecretBytes))
    status = failed(MC_UNREACHABLE, "another process answers at the peer's address");
  std::shared_ptr<LeasePage> leases;
  if (status.ok() && link->peer.same_host) {
    status = passed.valid() ? LeasePage::open(passed.get(), leases)
                            : failed(MC_UNREACHABLE,
                                     "the peer's lease page did not arrive (is the limit of open files "
                                     "reached?)");
  }
  if (!status.ok()) {
    lose(attempt, status);
    return false;
  }
  std::vector<RemotePointer> unasked;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return false;
    link->leases = std::move(leases);
    attempt.connection->state = Connection::State::kReady;
    unasked.swap(attempt.connection->unasked);
  }
  for (const auto& remote : unasked) ask(attempt, remote);
  return true;
}

void Asker::ask(const Attempt& attempt, const RemotePointer& remote) {
  uint64_t request = next_request_++;
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;
    attempt.connection->asked[request] = remote;
    remote->parts.clear();
    link = attempt.connection->link;
  }
  Message question = make_message(MessageKind::kAsk);
  question.request = request;
  question.region_id = remote->id;
  std::memcpy(question.secret, remote->key.data(), remote->key.size());
  send(link, question);
  loop_.at(deadline_after(answer_timeout_s_),
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

void Asker::on_part(const Attempt& attempt, const Message& part, UniqueFd passed) {
  std::lock_guard lock(mutex_);
  auto found = attempt.connection->asked.find(part.request);
  if (found == attempt.connection->asked.end() || found->second->parts.size() >= kMostParts) return;
  std::shared_ptr<const UniqueFd> fd;
  if (passed.valid()) fd = std::make_shared<const UniqueFd>(std::move(passed));
  found->second->parts.push_back({part, std::move(fd)});
}

void Asker::on_grant(const Attempt& attempt, const std::shared_ptr<Link>& link, const Message& grant) {
  RemotePointer remote;
  std::vector<Offer::Part> parts;
  {
    std::lock_guard lock(mutex_);
    auto found = attempt.connection->asked.find(grant.request);
    if (!current(attempt) || found == attempt.connection->asked.end()) return;
    remote = std::move(found->second);
    attempt.connection->asked.erase(found);
    parts.swap(remote->parts);
  }
  Status status = reason_of(grant);
  std::shared_ptr<Opened> opened;
  bool granted = status.ok();
  if (granted && grant.slot >= LeasePage::kSlots)
    status = failed(MC_UNREACHABLE, "the peer's grant is garbled");
  else if (granted)
    status = hooks_.open(link, grant, std::move(parts), opened);
  if (opened) {
    opened->link = link;
    opened->grant = grant.grant;
    opened->lease = link->leases ? &link->leases->slot(grant.slot) : nullptr;
    opened->token = grant.token;
    opened->access = grant.access & kAllAccess;
    opened->length = grant.length;
  } else if (granted) {
    Message release = make_message(MessageKind::kRelease);
    release.grant = grant.grant;
    send(link, release);
  }
  settle(attempt, remote, opened, status);
}

void Asker::on_revoke(const Attempt& attempt, uint64_t grant) {
  RemotePointer remote;
  std::shared_ptr<Opened> opened;
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(mutex_);
    auto found = attempt.connection->granted.find(grant);
    if (found == attempt.connection->granted.end()) return;
    remote = std::move(found->second);
    attempt.connection->granted.erase(found);
    opened = std::move(remote->opened);
    // At once: what is open without a region would pass for done.
    remote->opened.reset();
    remote->state = Remote::State::kRefused;
    remote->refusal = withdrawn();
    link = attempt.connection->link;
    auto named = attempt.connection->remotes.find({remote->id, remote->key});
    if (named != attempt.connection->remotes.end() && named->second == remote)
      attempt.connection->remotes.erase(named);
  }
  Closing closing{link, opened ? opened->life : nullptr, grant};
  opened.reset();
  settle(attempt, remote, nullptr, withdrawn());
  let_go(std::move(closing));
}

void Asker::let_go(Closing closing) {
  std::shared_ptr<Link> link = closing.link.lock();
  if (!link) return;  // its end told the peer
  if (hooks_.nudge) hooks_.nudge();
  if (!closing.life.expired()) {
    loop_.at(now_ns() + kLetGoNs, [this, closing = std::move(closing)] { let_go(closing); });
    return;
  }
  Message release = make_message(MessageKind::kRelease);
  release.grant = closing.grant;
  send(link, release);
}

void Asker::send(const std::shared_ptr<Link>& link, const Message& message,
                 std::shared_ptr<const UniqueFd> passed) {
  if (link->ended) return;
  Channel& channel = link->channel;
  if (!channel.send(message, std::move(passed))) return;  // its end is an event of its own
  if (channel.congested()) loop_.change(channel.fd(), EPOLLIN | EPOLLRDHUP | EPOLLOUT);
}

// --------------------------------------------------------------------------------------------------------
// any thread

void Asker::settle(const Attempt& attempt, const RemotePointer& remote, const std::shared_ptr<Opened>& opened,
                   const Status& refusal) {
  std::vector<Remote::Waiting> waiting;
  {
    std::lock_guard lock(mutex_);
    if (!current(attempt)) return;  // all is settled
    if (opened) attempt.connection->granted[opened->grant] = remote;
    waiting.swap(remote->waiting);
    remote->state = opened ? Remote::State::kOpen : Remote::State::kRefused;
    remote->refusal = refusal;
    remote->ask_again_ns = now_ns() + kAskAgainNs;
    remote->opened = opened;
  }
  for (auto& [cookie, later] : waiting) later(opened, refusal);
}

void Asker::lose(const Attempt& attempt, const Status& failure) {
  end(attempt, Connection::State::kLost, failure);
}

void Asker::end(const Attempt& attempt, Connection::State state, const Status& failure) {
  const ConnectionPointer& connection = attempt.connection;
  std::vector<Remote::Waiting> waiting;
  std::vector<std::shared_ptr<Opened>> dropped;
  std::shared_ptr<Link> link;
  {
    std::lock_guard lock(mutex_);
    bool meant = attempt.number == 0 ? connection->state != Connection::State::kClosed : current(attempt);
    if (!meant) return;
    connection->state = state;
    link = std::exchange(connection->link, nullptr);
    auto shut = [&](const RemotePointer& remote) {
      if (remote->opened) dropped.push_back(std::exchange(remote->opened, nullptr));
      if (remote->state != Remote::State::kRefused) remote->state = Remote::State::kUnasked;
      for (auto& item : remote->waiting) waiting.push_back(std::move(item));
      remote->waiting.clear();
      remote->parts.clear();
    };
    for (auto& [name, remote] : connection->remotes) shut(remote);
    for (auto& remote : connection->unasked) shut(remote);
    for (auto& [request, remote] : connection->asked) shut(remote);
    connection->unasked.clear();
    connection->asked.clear();
    connection->granted.clear();
    if (state == Connection::State::kClosed) {
      connection->remotes.clear();
      std::erase(connections_, connection);
    }
  }
  for (auto& [cookie, later] : waiting) later(nullptr, failure);
  if (!link) return;
  if (state == Connection::State::kLost) link->lost.store(true, std::memory_order_release);
  loop_.post([this, link, failure, dropped = std::move(dropped)] {
    link->ended = true;
    loop_.forget(link->channel.fd());
    if (link->pidfd.valid()) loop_.forget(link->pidfd.get());
    if (hooks_.ended) hooks_.ended(link, failure);
  });
}

}  // namespace mooncake::driver
