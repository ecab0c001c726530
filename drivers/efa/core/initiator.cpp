#include "initiator.hpp"

#include <sys/uio.h>

#include "support/handles.hpp"

namespace mooncake::efa {
namespace {

constexpr uint64_t kPingNs = 1'000'000'000;
// How long posted operations that were cancelled may take by themselves: of a peer that is silent, of any.
constexpr uint64_t kSilentGraceNs = 500'000'000;
constexpr uint64_t kPartingNs = 150'000'000;  // for operations that a peer lets end before it goes
constexpr uint64_t kGraceNs = 5'000'000'000;

uint64_t nanoseconds(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

Status cancelled() { return failed(MC_CANCELLED, "the operation was cancelled"); }

}  // namespace

mc_status Initiator::code_of(int error) {
  // What the target's registration of memory does not allow.
  if (error == EACCES || error == EPERM || error == EKEYREJECTED || error == fi::kNoKey) return MC_REFUSED;
  return MC_UNREACHABLE;
}

std::shared_ptr<Connection> Initiator::connect(const Address& address) {
  auto connection = std::make_shared<Connection>();
  connection->address = address;
  connections_.emplace(connection.get(), connection);
  return connection;
}

void Initiator::disconnect(const ConnectionPointer& connection) {
  if (connection->state == Connection::State::kReady && connection->posted == 0) {
    Message goodbye;
    goodbye.kind = Kind::kGoodbye;
    send(*connection, goodbye);
    parting_[connection->number] = connection->link;
  }
  lose(*connection, failed(MC_CLOSED, "the connection was closed"));
  connection->state = Connection::State::kClosed;
  for (auto& [number, remote] : connection->remotes) remote->connection = nullptr;
  connections_.erase(connection.get());
}

void Initiator::close() {
  while (!connections_.empty()) {
    ConnectionPointer connection = connections_.begin()->second;
    disconnect(connection);
  }
}

std::shared_ptr<Remote> Initiator::import(Connection& connection, uint64_t region, const Key& key) {
  auto remote = std::make_shared<Remote>();
  remote->connection = &connection;
  remote->number = driver::new_serial();
  remote->region = region;
  remote->key = key;
  connection.remotes.emplace(remote->number, remote);
  if (connection.state == Connection::State::kReady) ask(connection, remote);
  return remote;
}

void Initiator::release(const std::shared_ptr<Remote>& remote) {
  remote->released = true;
  settle(*remote);
}

// After an operation of it has ended, or its handle has gone.
void Initiator::settle(Remote& remote) {
  if (remote.connection == nullptr) return;
  Connection& connection = *remote.connection;
  if (remote.owes && remote.posted == 0) {
    remote.owes = false;
    tell_released(connection, remote.grant);
  }
  if (remote.released && remote.users == 0) connection.remotes.erase(remote.number);
}

// Unless another remote of the same grant still has operations posted.
void Initiator::tell_released(Connection& connection, uint64_t grant) {
  for (const auto& [number, remote] : connection.remotes) {
    if (remote->owes && remote->grant == grant) return;
  }
  Message message;
  message.kind = Kind::kReleased;
  message.grant = grant;
  send(connection, message);
}

void Initiator::place(Operation& operation, bool more) {
  Remote& remote = *operation.remote;
  Connection& connection = *operation.connection;
  ++remote.users;
  operation.state = Operation::State::kWaiting;
  operation.epoch = nullptr;
  if (operation.opcode == MC_WRITE) {
    operation.epoch = &open_epoch(connection);
    ++operation.epoch->writes;
    ++operation.epoch->unfinished;
  }
  if (remote.state == Remote::State::kRefused) return finish(operation, &remote.refusal);
  if (remote.state == Remote::State::kOpen) {
    if (connection.state != Connection::State::kReady || !connection.backlog.empty() ||
        post(operation, more) == -EAGAIN)
      connection.backlog.push(&operation);
    return;
  }
  remote.waiting.push(&operation);
  if (connection.state == Connection::State::kDown) {
    connection.state = Connection::State::kWanted;
    wanted_ = true;
  }
}

void Initiator::cancel(uint64_t cookie) {
  for (Operation& operation : shared_.operations()) {
    if (operation.cookie != cookie || operation.state == Operation::State::kFree) continue;
    Connection& connection = *operation.connection;
    operation.cancelled = true;
    if (operation.state == Operation::State::kPosted) {
      if (connection.cancelled_ns == 0) connection.cancelled_ns = now_ns();
      continue;
    }
    auto is_this = [&](const Operation& each) { return &each == &operation; };
    operation.remote->waiting.take_if(is_this);
    connection.backlog.take_if(is_this);
    Status status = cancelled();
    finish(operation, &status);
  }
}

// ---- posting

ssize_t Initiator::post(Operation& operation, bool more) {
  Connection& connection = *operation.connection;
  Remote& remote = *operation.remote;
  if (!remote.allows(operation.opcode, operation.remote_offset, operation.length)) {
    bool reads = operation.opcode == MC_READ;
    Status refusal =
        !remote.allows(operation.opcode, 0, 0)
            ? failed(MC_REFUSED, reads ? "the key does not allow reading" : "the key does not allow writing")
            : failed(MC_REFUSED, "the range ends outside the peer's region");
    finish(operation, &refusal);
    return 0;
  }
  Token* token = connection.link->take_transfer();
  if (token == nullptr) return -EAGAIN;
  iovec local{reinterpret_cast<void*>(operation.local_address), operation.length};
  fi::RemoteRange target{remote.base + operation.remote_offset, operation.length, remote.memory_key};
  fi::RmaMessage message{};
  message.msg_iov = &local;
  message.desc = &operation.descriptor;
  message.iov_count = 1;
  message.addr = connection.peer;
  message.rma_iov = &target;
  message.rma_iov_count = 1;
  message.context = &token->scratch;
  uint64_t flags = fi::kCompletion | (more ? fi::kMore : 0);
  fi::Endpoint* endpoint = connection.link->endpoint();
  if (operation.epoch != nullptr && operation.epoch->counted) {
    flags |= fi::kRemoteData;
    message.data = notice_data(connection.slot, operation.epoch->number);
  }
  token->operation = &operation;
  operation.state = Operation::State::kPosted;
  ssize_t rc = operation.opcode == MC_READ
                   ? endpoint->rma->readmsg(endpoint, &message, flags)
                   : endpoint->rma->writemsg(endpoint, &message, flags | shared_.fabric.write_flags());
  if (rc == 0) {
    ++remote.posted;
    ++connection.posted;
    return 0;
  }
  operation.state = Operation::State::kWaiting;
  connection.link->give_back(*token);
  if (rc == -EAGAIN) return rc;
  Status failure = failed(code_of(static_cast<int>(-rc)),
                          "libfabric does not post: " + shared_.fabric.say(static_cast<int>(rc)));
  finish(operation, &failure);
  return 0;
}

void Initiator::pump(Connection& connection) {
  if (connection.state != Connection::State::kReady) return;
  for (size_t count = 1; !connection.backlog.empty(); ++count) {
    // Out of the queue before it is posted: post() may end it, and so put it into another one.
    Operation* operation = connection.backlog.pop();
    const Operation* next = connection.backlog.front();
    bool more = next != nullptr && count % kMostMore != 0 && connection.link->has_room_for_two() &&
                next->remote->allows(next->opcode, next->remote_offset, next->length);
    if (post(*operation, more) == -EAGAIN) return connection.backlog.push_front(operation);
  }
}

void Initiator::finish(Operation& operation, const Status* failure) {
  Remote& remote = *operation.remote;
  Epoch* epoch = std::exchange(operation.epoch, nullptr);
  Connection* connection = operation.connection;
  shared_.finish(operation, failure);
  --remote.users;
  if (epoch != nullptr) {
    --epoch->unfinished;
    if (failure != nullptr && epoch->failure.ok()) epoch->failure = *failure;
    if (epoch->closed) send_notices(*connection);
  }
  if (remote.users == 0 || remote.owes) settle(remote);
}

void Initiator::fail_all(OperationQueue& queue, const Status& failure) {
  OperationQueue all = std::exchange(queue, {});
  while (!all.empty()) {
    Operation* operation = all.pop();
    Status status = operation->cancelled ? cancelled() : failure;
    finish(*operation, &status);
  }
}

void Initiator::on_transfer(Token& token, const Status* failure) {
  Operation& operation = *token.operation;
  Connection& connection = *operation.connection;
  token.link->give_back(token);
  --operation.remote->posted;
  --connection.posted;
  bool lost = failure != nullptr && failure->code == MC_UNREACHABLE;
  if (failure == nullptr) connection.heard_ns = now_ns();
  if (lost && operation.opcode == MC_WRITE) connection.late = connection.session;
  Status kept = lost ? *failure : Status{};
  finish(operation, failure);
  if (lost)
    lose(connection, kept);
  else if (connection.state == Connection::State::kParting && connection.posted == 0)
    part(connection);
}

// ---- sessions

void Initiator::advance() {
  if (wanted_.exchange(false)) {
    std::vector<Connection*> all;
    for (auto& [connection, owner] : connections_) {
      if (connection->state == Connection::State::kWanted) all.push_back(connection);
    }
    for (Connection* connection : all) begin(*connection);
  }
  std::vector<Link*> broken;
  for (const auto& link : links_.open()) {
    if (!link->flush()) broken.push_back(link.get());
  }
  for (Link* link : broken)
    abandon(*link, failed(MC_UNREACHABLE, "libfabric reported an endpoint as unusable"));
  for (auto& [connection, owner] : connections_) {
    if (!connection->backlog.empty()) pump(*connection);
  }
}

void Initiator::begin(Connection& connection) {
  connection.state = Connection::State::kConnecting;
  connection.began_ns = now_ns();
  if (Status status = greet(connection); !status.ok()) lose(connection, status);
}

Status Initiator::greet(Connection& connection) {
  if (Status status = links_.take(connection.link); !status.ok()) return status;
  Link& link = *connection.link;
  connection.number = driver::new_serial();
  connection.sequencer = {};
  sessions_[connection.number] = &connection;
  if (Status status = link.reach(connection.address.door, connection.door); !status.ok()) return status;
  if (Status status = driver::fill_random(connection.session.data(), connection.session.size()); !status.ok())
    return status;
  Message hello;
  hello.kind = Kind::kHello;
  hello.from = connection.number;
  hello.session = connection.session;
  hello.key = connection.address.name;
  hello.previous = connection.late;
  hello.request = connection.epochs.empty() ? 0 : connection.epochs.front().number;
  hello.address = link.address().bytes;
  hello.address_length = link.address().length;
  link.send(connection.door, hello);
  return {};
}

void Initiator::send(Connection& connection, Message message) {
  message.to = connection.guest;
  message.from = connection.number;
  message.session = connection.session;
  message.sequence = connection.sequencer.next_to_send();
  connection.link->send(connection.peer, message);
}

void Initiator::on_message(const Message& message) {
  if (message.kind == Kind::kFarewell) return on_farewell(message);
  auto found = sessions_.find(message.to);
  if (found == sessions_.end()) return;
  Connection& connection = *found->second;
  if (!driver::equal_in_constant_time(connection.session.data(), message.session.data(),
                                      message.session.size()))
    return;
  connection.heard_ns = now_ns();
  if (message.kind == Kind::kWelcome) {
    if (connection.state == Connection::State::kConnecting) on_welcome(connection, message);
    return;
  }
  ConnectionPointer alive = connections_.at(&connection);
  if (!connection.sequencer.accept(message, [&](const Message& next) { return handle(connection, next); }))
    lose(connection, failed(MC_UNREACHABLE, "the peer's messages make no sense"));
}

// Not by the number alone: who guesses it can only make a link go that nobody uses.
void Initiator::on_farewell(const Message& message) {
  auto found = parting_.find(message.to);
  if (found == parting_.end()) return;
  Link& link = *found->second;
  parting_.erase(found);
  if (link.sessions == 0) link.closes_ns = now_ns();
}

void Initiator::on_welcome(Connection& connection, const Message& message) {
  if (message.status != MC_OK) {
    lose(connection, failed(MC_UNREACHABLE, "the peer refused: " + std::string(message.said())));
    return;
  }
  FabricAddress address{message.address, message.address_length};
  if (Status status = connection.link->reach(address, connection.peer); !status.ok()) {
    lose(connection, status);
    return;
  }
  connection.link->forget(std::exchange(connection.door, fi::kAddressUnspecified));
  connection.guest = message.from;
  connection.slot = static_cast<uint32_t>(message.grant);
  connection.state = Connection::State::kReady;
  connection.pinged_ns = connection.heard_ns;
  connection.late = {};  // the peer has ended that session before it answered
  for (auto& [number, remote] : connection.remotes) {
    if (remote->state == Remote::State::kUnasked) ask(connection, remote);
  }
  send_notices(connection);
}

// False when the session is over.
bool Initiator::handle(Connection& connection, const Message& message) {
  if (connection.state != Connection::State::kReady && message.kind != Kind::kGoodbye) return true;
  switch (message.kind) {
    case Kind::kAnswer:
      on_answer(connection, message);
      return true;
    case Kind::kRevoked:
      on_revoked(connection, message);
      return true;
    case Kind::kPong:
      return true;
    case Kind::kNoticed:
      on_noticed(connection, message);
      return true;
    case Kind::kGoodbye:
      connection.parting_ns = now_ns();
      connection.state = Connection::State::kParting;
      if (connection.posted > 0) return true;  // what the peer does before it goes
      part(connection);
      return false;
    default:
      lose(connection, failed(MC_UNREACHABLE, "the peer sent what a target does not send"));
      return false;
  }
}

void Initiator::part(Connection& connection) {
  Message farewell;
  farewell.kind = Kind::kFarewell;
  send(connection, farewell);
  lose(connection, failed(MC_UNREACHABLE, "the peer closed its endpoint"));
}

void Initiator::ask(Connection& connection, const std::shared_ptr<Remote>& remote) {
  remote->state = Remote::State::kAsked;
  Message message;
  message.kind = Kind::kAsk;
  message.request = driver::new_serial();
  message.region = remote->region;
  message.key = remote->key;
  connection.asked[message.request] = remote;
  send(connection, message);
}

void Initiator::on_answer(Connection& connection, const Message& message) {
  auto found = connection.asked.find(message.request);
  if (found == connection.asked.end()) return;
  std::shared_ptr<Remote> asked = std::move(found->second);
  connection.asked.erase(found);
  Remote& remote = *asked;
  if (message.status != MC_OK) {
    refuse(remote, failed(MC_REFUSED, std::string(message.said())));
  } else {
    remote.state = Remote::State::kOpen;
    remote.grant = message.grant;
    remote.memory_key = message.memory_key;
    remote.base = message.base;
    remote.length = message.length;
    remote.access = message.access;
    connection.backlog.append(remote.waiting);
    pump(connection);
  }
  settle(remote);
}

void Initiator::on_revoked(Connection& connection, const Message& message) {
  std::vector<std::shared_ptr<Remote>> affected;
  for (auto& [number, remote] : connection.remotes) {
    if (remote->state == Remote::State::kOpen && remote->grant == message.grant) affected.push_back(remote);
  }
  for (const auto& remote : affected) {
    refuse(*remote, failed(MC_REFUSED, "the peer's region was closed or its key revoked"));
    remote->owes = remote->posted > 0;
  }
  tell_released(connection, message.grant);
}

void Initiator::refuse(Remote& remote, const Status& refusal) {
  remote.state = Remote::State::kRefused;
  remote.refusal = refusal;
  fail_all(remote.waiting, refusal);
  OperationQueue of_it =
      remote.connection->backlog.take_if([&](const Operation& each) { return each.remote == &remote; });
  fail_all(of_it, refusal);
}

void Initiator::on_lost_send(Token& token, const Status& failure) {
  auto found = sessions_.find(token.session);
  if (found != sessions_.end()) lose(*found->second, failure);
}

void Initiator::lose(Connection& connection, const Status& failure, bool at_once) {
  if (connection.posted > 0) return abandon(*connection.link, failure);
  if (Link* link = std::exchange(connection.link, nullptr)) {
    sessions_.erase(connection.number);
    link->forget(std::exchange(connection.door, fi::kAddressUnspecified));
    if (failure.code != MC_CLOSED) link->forget(connection.peer);  // else a goodbye is on its way
    connection.peer = fi::kAddressUnspecified;
    links_.release(*link, at_once);
  }
  end_operations(connection, failure);
}

// Closes a link under operations that nothing else would end; its other sessions end with it.
void Initiator::abandon(Link& link, const Status& failure) {
  std::erase_if(parting_, [&](const auto& each) { return each.second == &link; });
  links_.close(link);
  std::vector<ConnectionPointer> on_it;
  for (auto& [connection, owner] : connections_) {
    if (connection->link == &link) on_it.push_back(owner);
  }
  for (const ConnectionPointer& connection : on_it) {
    connection->link = nullptr;
    connection->door = connection->peer = fi::kAddressUnspecified;
    sessions_.erase(connection->number);
  }
  for (Token& token : link.transfers()) {
    Operation* operation = std::exchange(token.operation, nullptr);
    if (operation == nullptr) continue;
    Connection& connection = *operation->connection;
    if (operation->opcode == MC_WRITE) connection.late = connection.session;
    --operation->remote->posted;
    --connection.posted;
    operation->remote->owes = false;
    Status status = operation->cancelled ? cancelled() : failure;
    finish(*operation, &status);
  }
  for (const ConnectionPointer& connection : on_it) end_operations(*connection, failure);
}

void Initiator::end_operations(Connection& connection, const Status& failure) {
  connection.state = Connection::State::kDown;
  connection.cancelled_ns = 0;
  connection.asked.clear();
  fail_notices(connection, failure);
  fail_all(connection.backlog, failure);
  auto remotes = connection.remotes;  // settle() erases
  for (auto& [number, remote] : remotes) {
    remote->owes = false;
    if (remote->state != Remote::State::kRefused) remote->state = Remote::State::kUnasked;
    fail_all(remote->waiting, failure);
    settle(*remote);
  }
  forget_epochs(connection);
}

// ---- time

void Initiator::tick(uint64_t now) {
  for (auto& [connection, owner] : connections_) look_after(*connection, now);
  std::vector<Link*> stuck;
  for (const auto& link : links_.open()) {
    uint64_t sent = link->oldest_send_ns();
    if (link->sessions > 0 && sent != 0 &&
        passed(sent, now) > 2 * nanoseconds(shared_.options.dead_peer_timeout_s))
      stuck.push_back(link.get());
  }
  for (Link* link : stuck)
    abandon(*link, failed(MC_UNREACHABLE, "messages to a peer do not leave this host"));
  std::erase_if(parting_, [&](const auto& each) {
    return each.second->closes_ns != 0 && now >= each.second->closes_ns;
  });
  links_.tick(now);
}

void Initiator::look_after(Connection& connection, uint64_t now) {
  const Options& options = shared_.options;
  if (connection.state == Connection::State::kConnecting &&
      passed(connection.began_ns, now) > nanoseconds(options.connect_timeout_s)) {
    lose(connection, failed(MC_UNREACHABLE, "the peer did not answer within connect_timeout_s"));
    return;
  }
  if (connection.state == Connection::State::kParting && passed(connection.parting_ns, now) > kPartingNs) {
    lose(connection, failed(MC_UNREACHABLE, "the peer closed its endpoint"));
    return;
  }
  if (connection.state != Connection::State::kReady) return;
  uint64_t silent = passed(connection.heard_ns, now);
  if (silent > nanoseconds(options.dead_peer_timeout_s)) {
    lose(connection, failed(MC_UNREACHABLE, "nothing was heard of the peer for dead_peer_timeout_s"));
    return;
  }
  if (connection.cancelled_ns != 0) {
    bool left = false;
    for (const Token& token : connection.link->transfers()) {
      const Operation* operation = token.operation;
      left = left || (operation != nullptr && operation->connection == &connection && operation->cancelled);
    }
    uint64_t since = passed(connection.cancelled_ns, now);
    if (!left) {
      connection.cancelled_ns = 0;
    } else if (since > kGraceNs || (since > kSilentGraceNs && silent > kSilentGraceNs)) {
      lose(connection, failed(MC_UNREACHABLE, "the connection was ended to cancel an operation"));
      return;
    }
  }
  uint64_t pause = connection.cancelled_ns != 0 ? kSilentGraceNs / 4 : kPingNs;
  if (passed(connection.pinged_ns, now) > pause) {
    connection.pinged_ns = now;
    Message ping;
    ping.kind = Kind::kPing;
    send(connection, ping);
  }
}

bool Initiator::stalled() const {
  for (auto& [connection, owner] : connections_) {
    if (!connection->backlog.empty()) return true;
  }
  return links_.stalled();
}

uint32_t Initiator::ready() const {
  uint32_t count = 0;
  for (auto& [connection, owner] : connections_) count += connection->state == Connection::State::kReady;
  return count;
}

}  // namespace mooncake::efa
