// The life of a connection: dialed, greeted, broken, taken down, made anew. Control thread, but for the first
// functions.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "initiator.hpp"

namespace mooncake::verbs {
namespace {

constexpr uint64_t kFirstPauseNs = 50 * kMs;
constexpr uint32_t kMostDoublings = 6;  // 3.2 s
constexpr uint64_t kNever = ~uint64_t{0};

struct LateToken {
  Nonce session;
  uint64_t generation;
};

}  // namespace

std::shared_ptr<Connection> Initiator::connect(Address peer) {
  auto connection = std::make_shared<Connection>(std::move(peer));
  // Two of one peer must not be confused; random, because it is what fence() believes.
  (void)driver::fill_random(connection->session.data(), connection->session.size());
  std::lock_guard lock(mutex_);
  connections_.push_back(connection);
  return connection;
}

void Initiator::disconnect(const std::shared_ptr<Connection>& connection) {
  std::lock_guard lock(mutex_);
  connection->closing = true;
  ask_for_control(*connection);
}

std::shared_ptr<Remote> Initiator::import(Connection& connection, uint64_t region_id, const uint8_t* key) {
  auto remote = std::make_shared<Remote>();
  remote->connection = &connection;
  remote->region_id = region_id;
  remote->key = driver::key_from(key);
  std::lock_guard lock(mutex_);
  connection.remotes[remote.get()] = remote;
  want_answer(*remote);
  return remote;
}

void Initiator::release(Remote& remote) {
  std::lock_guard lock(mutex_);
  remote.released = true;
  if (remote.users == 0) remote.connection->remotes.erase(&remote);
}

Status Initiator::late_writes(Connection& connection, void* token, size_t* length) {
  std::lock_guard lock(mutex_);
  if (connection.late == 0) {
    *length = 0;
    return {};
  }
  if (*length < sizeof(LateToken)) return failed(MC_INVALID, "there is no room for the token");
  std::memcpy(token, connection.session.data(), sizeof connection.session);
  for (size_t i = 0; i < sizeof connection.late; ++i)
    static_cast<uint8_t*>(token)[sizeof(Nonce) + i] = static_cast<uint8_t>(connection.late >> (8 * i));
  *length = sizeof(LateToken);
  return {};
}

uint32_t Initiator::open_connections() {
  std::lock_guard lock(mutex_);
  return ready_;
}

// With the mutex held.
void Initiator::ask_for_control(Connection& connection) {
  if (std::exchange(connection.wants_control, true)) return;
  attention_.push_back(connection.shared_from_this());
  poller_.wake();
}

void Initiator::want_answer(Remote& remote) {
  Connection& connection = *remote.connection;
  if (remote.state == Remote::State::kUnknown) {
    remote.state = Remote::State::kToAsk;
    connection.to_ask.push_back(connection.remotes.at(&remote));
  }
  ask_for_control(connection);
}

// ---- control thread

uint64_t Initiator::attend() {
  std::vector<std::shared_ptr<Connection>> due;
  {
    std::lock_guard lock(mutex_);
    due.swap(attention_);
    for (const auto& connection : due) connection->wants_control = false;
  }
  uint64_t now = driver::now_ns();
  uint64_t next = kNever;
  for (const auto& connection : std::exchange(timed_, {})) {
    connection->timed = false;
    due.push_back(connection);
  }
  for (const auto& connection : due) {
    if (connection->deadline_ns != 0 && now >= connection->deadline_ns) {
      connection->deadline_ns = 0;
      std::string what =
          connection->name + " does not answer within " + std::to_string(options_.connect_timeout_ms) + " ms";
      hang_up(*connection);
      std::unique_lock lock(mutex_);
      Status late = failed(MC_UNREACHABLE, what);
      bool ready = connection->state == State::kReady;
      broken(*connection, late);
      lock.unlock();
      if (!ready) give_up(*connection, late);
    }
    step(connection);
  }
  make_room();
  for (const auto& connection : timed_) {
    uint64_t until = connection->deadline_ns != 0 ? connection->deadline_ns : connection->retry_ns;
    next = std::min(next, until);
  }
  return next;
}

// Has step() called again when its time has come.
void Initiator::wait_for_time(Connection& connection) {
  if (!std::exchange(connection.timed, true)) timed_.push_back(connection.shared_from_this());
}

void Initiator::step(const std::shared_ptr<Connection>& held) {
  Connection& connection = *held;
  std::unique_lock lock(mutex_);
  if (connection.closing && connection.state == State::kReady)
    broken(connection, failed(MC_CLOSED, "the connection was closed on this side"));
  if (connection.state == State::kBroken) {
    lock.unlock();
    take_down(connection);
    lock.lock();
  }
  if (connection.closing) {
    connection.state = State::kIdle;
    lock.unlock();
    connection.fresh.clear();
    hang_up(connection);
    fail_waiting(connection, failed(MC_CLOSED, "the connection was closed on this side"));
    lock.lock();
    if (connection.operations == 0) std::erase(connections_, held);
    return;
  }
  State state = connection.state;
  pump(connection);
  deliver();
  bool wanted = !connection.queue.empty() || !connection.to_ask.empty() || !connection.notices.empty();
  lock.unlock();
  if (state == State::kIdle && wanted) {
    if (driver::now_ns() < connection.retry_ns) return wait_for_time(connection);
    connection.next_host = 0;
    connection.deadline_ns = driver::now_ns() + options_.connect_timeout_ms * kMs;
    connection.channel ? greet(connection) : dial(connection);
  } else if (state == State::kReady && wanted) {
    ask_for_keys(connection);
  }
  if (connection.deadline_ns != 0) wait_for_time(connection);
}

void Initiator::dial(Connection& connection) {
  Status status = failed(MC_UNREACHABLE, "the peer has no address");
  for (; connection.next_host < connection.peer.hosts.size(); ++connection.next_host) {
    const std::string& host = connection.peer.hosts[connection.next_host];
    SocketAddress address;
    if (status = resolve(host, connection.peer.port, address); !status.ok()) continue;
    driver::UniqueFd made(socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!made.valid()) return give_up(connection, system_failure(MC_IO, "cannot create a socket", errno));
    auto* name = reinterpret_cast<sockaddr*>(&address.storage);
    if (::connect(made.get(), name, address.length) != 0 && errno != EINPROGRESS) {
      status = system_failure(MC_UNREACHABLE, "cannot connect to " + connection.name, errno);
      continue;
    }
    connection.channel = std::make_unique<Channel>(std::move(made));
    connection.channel_id = poller_.new_id();
    status = poller_.add(connection.channel->fd(), connection.channel_id, EPOLLOUT);
    if (!status.ok()) return give_up(connection, status);
    connection.channel_writes = true;
    std::lock_guard lock(mutex_);
    connection.state = State::kDialing;
    by_socket_[connection.channel_id] = connection.shared_from_this();
    return;
  }
  give_up(connection, status);
}

void Initiator::dialed(Connection& connection) {
  int error = 0;
  socklen_t size = sizeof error;
  getsockopt(connection.channel->fd(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error == 0) {
    connection.channel->watch(options_.dead_peer_timeout_ms);
    return greet(connection);
  }
  hang_up(connection);
  ++connection.next_host;
  if (connection.next_host < connection.peer.hosts.size()) return dial(connection);
  give_up(connection, system_failure(MC_UNREACHABLE, "cannot connect to " + connection.name, error));
}

void Initiator::greet(Connection& connection) {
  PortAddress own;
  if (Status status = device_->look(own); !status.ok())
    return give_up(connection, failed(MC_UNREACHABLE, status.reason));
  Greeting hello;
  hello.nonce = connection.peer.nonce;
  hello.session = connection.session;
  hello.mtu = static_cast<uint8_t>(own.mtu);
  hello.rd_atomic = static_cast<uint8_t>(options_.rd_atomic);
  hello.ethernet = own.ethernet;
  hello.gid = own.gid;
  hello.lid = own.lid;
  connection.fresh.clear();
  for (uint32_t i = 0; i < options_.qps; ++i) {
    auto& qp = connection.fresh.emplace_back();
    Status status = QueuePair::make(*device_, options_, QueuePair::Side::kInitiator, nullptr, qp);
    if (!status.ok()) return give_up(connection, failed(MC_UNREACHABLE, status.reason));
    hello.qps.push_back(qp->address());
  }
  {
    std::lock_guard lock(mutex_);
    hello.generation = ++connection.generation;
    connection.state = State::kGreeting;
  }
  send(connection, encode(Message::kHello, hello));
}

void Initiator::welcome(Connection& connection, const Greeting& greeting) {
  {
    std::lock_guard lock(mutex_);
    if (connection.state != State::kGreeting || greeting.generation != connection.generation) return;
  }
  if (greeting.status != MC_OK)
    return give_up(connection, failed(MC_UNREACHABLE, connection.name + ": " + greeting.reason));
  PortAddress own;
  Status status = device_->look(own);
  if (greeting.qps.size() != connection.fresh.size())
    status = failed(MC_UNREACHABLE, connection.name + " made another number of queue pairs");
  for (size_t i = 0; i < connection.fresh.size() && status.ok(); ++i)
    status = connection.fresh[i]->connect(own, greeting, greeting.qps[i]);
  if (status.ok()) status = check_tags(connection.fresh.size());
  if (!status.ok()) return give_up(connection, failed(MC_UNREACHABLE, status.reason));
  connection.deadline_ns = 0;
  {
    std::lock_guard lock(mutex_);
    for (const auto& qp : connection.fresh) qp->tag(tags_.give(qp.get()), &connection);
    for (size_t i = 0; i < connection.fresh.size() && greeting.ring_slots > 0; ++i) {
      uint64_t before = i * greeting.ring_slots * MC_NOTICE_MAX;
      connection.fresh[i]->use_ring({greeting.ring_iova + before, greeting.ring_rkey, greeting.ring_slots});
    }
    connection.qps = std::move(connection.fresh);
    connection.fresh.clear();
    connection.next_qp = 0;
    connection.state = State::kReady;
    connection.visited = true;
    connection.late = 0;  // the peer has ended what was before
    ++ready_;
    pump(connection);
    deliver();
  }
  ask_for_keys(connection);
}

// Connections that have work keep their queue pairs, also more of them than max_connections.
Status Initiator::check_tags(size_t count) {
  std::lock_guard lock(mutex_);
  if (tags_.free() >= count) return {};
  return failed(MC_UNREACHABLE, "connections with work have all " + std::to_string(Tags::kMost) +
                                    " queue pairs of the endpoint; use fewer at a time, or lower option qps");
}

void Initiator::ask_for_keys(Connection& connection) {
  std::string requests;
  {
    std::lock_guard lock(mutex_);
    if (connection.state != State::kReady) return;
    for (auto& remote : std::exchange(connection.to_ask, {})) {
      if (remote->released && remote->users == 0) continue;
      ImportRequest request{next_ask_++, remote->region_id, remote->key};
      requests += encode(request);
      remote->state = Remote::State::kAsked;
      connection.asked[request.ask] = std::move(remote);
    }
    if (!connection.asked.empty() && connection.deadline_ns == 0)
      connection.deadline_ns = driver::now_ns() + options_.connect_timeout_ms * kMs;
  }
  if (connection.deadline_ns != 0) wait_for_time(connection);
  if (!requests.empty()) send(connection, requests);
}

void Initiator::imported(Connection& connection, ImportAnswer answer) {
  std::lock_guard lock(mutex_);
  auto found = connection.asked.find(answer.ask);
  if (found == connection.asked.end()) return;
  std::shared_ptr<Remote> remote = std::move(found->second);
  connection.asked.erase(found);
  // The peer is there: the time for what it has not answered yet begins anew.
  connection.deadline_ns =
      connection.asked.empty() ? 0 : driver::now_ns() + options_.connect_timeout_ms * kMs;
  bool open = answer.status == MC_OK;
  remote->state = open                          ? Remote::State::kOpen
                  : answer.status == MC_REFUSED ? Remote::State::kRefused
                                                : Remote::State::kUnknown;
  remote->opened = std::move(answer);
  Queue parked = std::exchange(remote->parked, {});
  while (!parked.empty()) {
    uint32_t index = parked.pop(operations_);
    if (remote->state == Remote::State::kUnknown) {
      Status status = failed(static_cast<mc_status>(remote->opened.status), remote->opened.reason);
      finish(index, &status);
    } else {
      place(index);
    }
  }
  last_ = kNone;
  pump_touched();
  deliver();
}

void Initiator::send(Connection& connection, const std::string& bytes) {
  if (!connection.channel || !connection.channel->send(bytes)) return;  // its end shows when it is read
  bool writes = connection.channel->wants_to_write();
  if (writes == connection.channel_writes) return;
  connection.channel_writes = writes;
  (void)poller_.change(connection.channel->fd(), connection.channel_id, EPOLLIN | (writes ? EPOLLOUT : 0u));
}

void Initiator::on_socket(uint64_t id, uint32_t events) {
  auto found = by_socket_.find(id);
  if (found == by_socket_.end()) return;
  std::shared_ptr<Connection> connection = found->second;
  State state;
  {
    std::lock_guard lock(mutex_);
    state = connection->state;
  }
  if (state == State::kDialing) {
    dialed(*connection);
  } else {
    if ((events & EPOLLOUT) != 0) send(*connection, {});
    if ((events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) read(*connection);
  }
  step(connection);
}

void Initiator::read(Connection& connection) {
  bool alive = connection.channel->receive();
  Message kind;
  std::string payload;
  while (connection.channel && connection.channel->next(&kind, &payload)) {
    Greeting greeting;
    ImportAnswer answer;
    Taken taken;
    if (kind == Message::kWelcome && decode(payload, greeting)) {
      welcome(connection, greeting);
    } else if (kind == Message::kImported && decode(payload, answer)) {
      imported(connection, std::move(answer));
    } else if (kind == Message::kTaken && decode(payload, taken)) {
      took(connection, taken);
    } else if (kind == Message::kRested && payload.size() == sizeof(uint64_t)) {
      uint64_t generation = 0;
      Reader(payload).number(&generation);
      std::lock_guard lock(mutex_);
      if (connection.late <= generation) connection.late = 0;
    } else {
      alive = false;
      break;
    }
  }
  if (!connection.channel || (alive && !connection.channel->failed())) return;
  std::string why =
      connection.channel->failed() ? connection.channel->reason() : "it does not keep to the protocol";
  Status status = failed(MC_UNREACHABLE, "lost " + connection.name + ": " + why);
  hang_up(connection);
  std::unique_lock lock(mutex_);
  State state = connection.state;
  broken(connection, status);
  lock.unlock();
  if (state == State::kGreeting || state == State::kDialing) give_up(connection, status);
}

void Initiator::hang_up(Connection& connection) {
  if (!connection.channel) return;
  poller_.remove(connection.channel->fd());
  by_socket_.erase(connection.channel_id);
  connection.channel.reset();
  connection.channel_writes = false;
}

void Initiator::give_up(Connection& connection, Status status) {
  hang_up(connection);
  connection.fresh.clear();
  connection.deadline_ns = 0;
  {
    std::lock_guard lock(mutex_);
    if (connection.state == State::kReady || connection.state == State::kBroken) return;
    connection.state = State::kIdle;
    ++connection.failures;
    connection.retry_ns =
        driver::now_ns() + (kFirstPauseNs << std::min(connection.failures - 1, kMostDoublings));
  }
  fail_waiting(connection, status);
}

// Everything that was accepted for a connection and is not with the device.
void Initiator::fail_waiting(Connection& connection, const Status& status) {
  std::lock_guard lock(mutex_);
  auto all = [](const Operation&) { return true; };
  auto end = [&](uint32_t index) { finish(index, &status); };
  connection.queue.extract(operations_, all, end);
  for (const auto& remote : remotes_of(connection)) {
    remote->parked.extract(operations_, all, end);
    if (remote->state == Remote::State::kToAsk || remote->state == Remote::State::kAsked)
      remote->state = Remote::State::kUnknown;
  }
  connection.to_ask.clear();
  connection.asked.clear();
  end_notices(connection, status);
  deliver();
}

void Initiator::take_down(Connection& connection) {
  for (const auto& qp : connection.qps) qp->end();
  std::unique_lock lock(mutex_);
  fetch(true);  // so that no completion of theirs takes up room any more
  std::vector<uint32_t> lost;
  for (const auto& qp : connection.qps) {
    uint32_t count = qp->retire_all([&](const QueuePair::Posted& posted) {
      pace_.lost(posted.bytes);
      Operation& operation = operations_[posted.operation];
      if (operation.opcode == MC_WRITE) connection.late = connection.generation;
      if (!std::exchange(operation.lost, true)) lost.push_back(posted.operation);
    });
    room_ += count;
    posted_ -= count;
    tags_.take_back(qp->tag());
  }
  connection.qps.clear();
  connection.in_flight_bytes = 0;
  connection.state = State::kIdle;
  requeue_lost(connection, lost);
  Status cause = std::exchange(connection.cause, {});
  uint64_t late = connection.late;
  bool refused = cause.code == MC_REFUSED;
  if (!refused && !cause.ok()) {
    ++connection.failures;
    connection.retry_ns =
        driver::now_ns() + (kFirstPauseNs << std::min(connection.failures - 1, kMostDoublings));
  }
  deliver();
  lock.unlock();
  if (!refused && !cause.ok()) {
    connection.deadline_ns = 0;
    fail_waiting(connection, cause);
  }
  if (late != 0) send(connection, Writer(Message::kRest).number(late).finish());
}

// With the mutex held. After a refusal only the operation that was refused has failed: the others, which
// broke with the queue pair, are begun anew. Else all of them have.
void Initiator::requeue_lost(Connection& connection, const std::vector<uint32_t>& lost) {
  bool refused = connection.cause.code == MC_REFUSED;
  uint32_t culprit = std::exchange(connection.culprit, kNone);
  std::shared_ptr<Remote> suspect;
  if (refused && culprit != kNone && operations_[culprit].remote != nullptr)
    suspect = connection.remotes.at(operations_[culprit].remote);
  connection.queue.extract(
      operations_, [](const Operation& operation) { return operation.lost; }, [](uint32_t) {});
  for (uint32_t index : lost) {
    Operation& operation = operations_[index];
    operation.lost = false;
    operation.in_flight = 0;
    Status cancelled = failed(MC_CANCELLED, "the operation was cancelled");
    if (operation.cancelled) {
      finish(index, &cancelled);
    } else if (!refused || index == culprit) {
      finish(index, &connection.cause);
    } else if (operation.opcode == kNotice) {  // it may have come: a second one would be one too many
      Status unknown = failed(MC_UNREACHABLE, "the queue pair broke while the notice was on its way");
      finish(index, &unknown);
    } else {
      operation.posted = 0;
      return_to_queue(connection, operation);
      connection.queue.put_first(operations_, index);
    }
  }
  if (suspect == nullptr) return;
  // Its key may have been revoked: the peer has to say so before anything more is tried with it.
  if (suspect->users == 0 && suspect->released) return;
  suspect->state = Remote::State::kUnknown;
  connection.queue.extract(
      operations_, [&](const Operation& operation) { return operation.remote == suspect.get(); },
      [&](uint32_t index) { suspect->parked.push(operations_, index); });
  want_answer(*suspect);
}

// The endpoint keeps queue pairs for so many peers. Of those without work, the sweep takes the first that was
// not used since it last came by; it comes back by itself.
void Initiator::make_room() {
  for (;;) {
    std::shared_ptr<Connection> victim = find_idle();
    if (!victim) return;
    take_down(*victim);
    hang_up(*victim);
  }
}

std::shared_ptr<Connection> Initiator::find_idle() {
  std::shared_ptr<Connection> victim;
  {
    std::lock_guard lock(mutex_);
    if (ready_ <= options_.max_connections) return nullptr;
    for (size_t i = 0; i < 2 * connections_.size() && !victim; ++i) {
      const auto& next = connections_[hand_++ % connections_.size()];
      if (next->state != State::kReady || next->operations > 0 || !next->asked.empty()) continue;
      if (!std::exchange(next->visited, false)) victim = next;
    }
    if (victim) broken(*victim, {});
  }
  return victim;  // null: all of them have work
}

void Initiator::lose_device() {
  std::lock_guard lock(mutex_);
  for (const auto& connection : connections_)
    broken(*connection, failed(MC_UNREACHABLE, "the device " + device_->name() + " reports that it is lost"));
}

void Initiator::close() {
  std::vector<std::shared_ptr<Connection>> all;
  {
    std::lock_guard lock(mutex_);
    all = connections_;
    for (const auto& connection : all) connection->closing = true;
  }
  for (const auto& connection : all) step(connection);
}

}  // namespace mooncake::verbs
