#include "target.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>

#include "support/peers/accepting.hpp"

namespace mooncake::verbs {
namespace {

constexpr size_t kMostStrangers = 256;
constexpr size_t kMostUnread = 1 << 20;

}  // namespace

Status Target::listen() {
  if (Status status = driver::fill_random(address_.nonce.data(), address_.nonce.size()); !status.ok())
    return status;
  auto port = static_cast<uint16_t>(options_.control_port);
  if (Status status = listen_at(options_.host, port, listener_, address_); !status.ok()) return status;
  return poller_.add(listener_.get(), Poller::kListener, EPOLLIN);
}

void Target::accept_peers() {
  for (;;) {
    driver::UniqueFd peer;
    driver::Accepted found = driver::accept_next(listener_.get(), peer);
    if (found == driver::Accepted::kRest) {
      (void)poller_.change(listener_.get(), Poller::kListener, 0);
      rest_until_ns_ = driver::now_ns() + driver::kAcceptRestNs;
    }
    if (found != driver::Accepted::kPeer) return;
    if (strangers_ >= kMostStrangers) continue;
    auto session = std::make_unique<Session>(std::move(peer));
    session->id = poller_.new_id();
    session->deadline_ns = driver::now_ns() + options_.connect_timeout_ms * kMs;
    session->channel.watch(options_.dead_peer_timeout_ms);
    if (!poller_.add(session->channel.fd(), session->id, EPOLLIN).ok()) continue;
    ++strangers_;
    sessions_[session->id] = std::move(session);
  }
}

void Target::on_socket(uint64_t id, uint32_t events) {
  auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  Session& session = *found->second;
  bool alive = true;
  if ((events & EPOLLOUT) != 0) alive = send(session, {});
  if (alive && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) alive = read(session);
  if (!alive) drop(id);
}

bool Target::read(Session& session) {
  bool alive = session.channel.receive();
  Message kind;
  std::string payload;
  while (session.channel.next(&kind, &payload)) {
    if (!on_message(session, kind, payload)) return false;
  }
  return alive && !session.channel.failed();
}

bool Target::on_message(Session& session, Message kind, const std::string& payload) {
  if (kind == Message::kHello) {
    Greeting hello;
    if (!decode(payload, hello) || hello.qps.empty()) return false;
    on_hello(session, hello);
    return !session.channel.failed();
  }
  if (session.deadline_ns != 0) return false;  // first things first
  if (kind == Message::kImport) {
    ImportRequest request;
    if (!decode(payload, request)) return false;
    on_import(session, request);
    return !session.channel.failed();
  }
  uint64_t generation = 0;
  Reader reader(payload);
  reader.number(&generation);
  if (kind != Message::kRest || !reader.ok()) return false;
  end_generations(session.name, generation);
  return send(session, Writer(Message::kRested).number(generation).finish());
}

void Target::on_hello(Session& session, const Greeting& hello) {
  Greeting answer;
  answer.session = hello.session;
  answer.generation = hello.generation;
  answer.mtu = answer.rd_atomic = 1;
  Status status;
  if (!driver::equal_in_constant_time(hello.nonce.data(), address_.nonce.data(), address_.nonce.size())) {
    status = failed(MC_UNREACHABLE, "another endpoint listens there now: the peer was restarted");
  } else {
    if (std::exchange(session.deadline_ns, 0) != 0) --strangers_;
    end_queue_pairs(session);  // also of one that says hello twice
    if (hello.generation > 0) end_generations(hello.session, hello.generation - 1);
    status = make_queue_pairs(session, hello, answer);
  }
  answer.status = status.code;
  answer.reason = status.reason.substr(0, MC_REASON_MAX - 1);
  send(session, encode(Message::kWelcome, answer));
}

Status Target::make_queue_pairs(Session& session, const Greeting& hello, Greeting& answer) {
  PortAddress own;
  if (Status status = device_->look(own); !status.ok()) return status;
  if (own.ethernet != (hello.ethernet != 0))
    return failed(MC_UNREACHABLE, "one side is on InfiniBand and the other on Ethernet");
  std::vector<std::unique_ptr<QueuePair>> made;
  for (const QpAddress& theirs : hello.qps) {
    auto& qp = made.emplace_back();
    Status status = QueuePair::make(*device_, options_, QueuePair::Side::kTarget, inbox_.cq(), qp);
    if (status.ok()) status = qp->connect(own, hello, theirs);
    if (!status.ok()) return status;
    answer.qps.push_back(qp->address());
  }
  std::unique_ptr<Inbox::Box> box;
  if (Status status = inbox_.add(session.id, hello.generation, made, box); !status.ok()) return status;
  if (box) {
    answer.ring_iova = box->iova();
    answer.ring_rkey = box->rkey();
    answer.ring_slots = kNoticesPerQp;
  }
  answer.mtu = static_cast<uint8_t>(own.mtu);
  auto incoming = static_cast<uint32_t>(std::max(device_->limits().max_qp_rd_atom, 1));
  answer.rd_atomic = static_cast<uint8_t>(std::min(incoming, options_.rd_atomic));
  answer.ethernet = own.ethernet;
  answer.gid = own.gid;
  answer.lid = own.lid;
  session.name = hello.session;
  session.generation = hello.generation;
  session.qps = std::move(made);
  session.box = std::move(box);
  return {};
}

void Target::on_import(Session& session, const ImportRequest& request) {
  Opened opened;
  Status status = regions_.open(request.region_id, request.key.data(), opened);
  ImportAnswer answer;
  answer.ask = request.ask;
  answer.status = status.code;
  answer.reason = status.reason.substr(0, MC_REASON_MAX - 1);
  if (status.ok()) {
    answer.access = opened.access;
    answer.iova = opened.registration->iova();
    answer.length = opened.registration->length();
    answer.chunk_shift = opened.registration->chunk_shift();
    for (size_t i = 0; i < opened.registration->chunks(); ++i)
      answer.rkeys.push_back(opened.registration->rkey(i));
  } else {
    refused_.fetch_add(1, std::memory_order_relaxed);
  }
  opened.registration.reset();  // revoke() waits for it
  send(session, encode(answer));
}

bool Target::send(Session& session, const std::string& bytes) {
  if (!session.channel.send(bytes) || session.channel.unsent() > kMostUnread) return false;
  bool writes = session.channel.wants_to_write();
  if (std::exchange(session.writes, writes) != writes)
    (void)poller_.change(session.channel.fd(), session.id, EPOLLIN | (writes ? EPOLLOUT : 0u));
  return true;
}

void Target::end_generations(const Nonce& name, uint64_t generation) {
  for (auto& [id, session] : sessions_) {
    if (session->name != name || session->generation > generation) continue;
    end_queue_pairs(*session);
  }
}

void Target::end_queue_pairs(Session& session) {
  session.qps.clear();
  inbox_.remove(std::move(session.box));
}

Status Target::fence(const void* token, size_t length, uint64_t deadline_ns) {
  Reader reader({static_cast<const char*>(token), length});
  auto asked = std::make_shared<Fence>();
  reader.bytes(asked->name.data(), asked->name.size());
  reader.number(&asked->generation);
  if (!reader.ok() || length != sizeof asked->name + sizeof asked->generation)
    return failed(MC_INVALID, std::to_string(length) + " bytes are no token of late writes");
  std::unique_lock lock(mutex_);
  if (closed_) return {};
  fences_.push_back(asked);
  poller_.wake();
  if (fenced_.wait_until(lock, driver::time_point(deadline_ns), [&] { return asked->done; })) return {};
  return failed(MC_TIMEOUT, device_->name() + " has not ended the peer's queue pairs yet; ask again");
}

void Target::end_fenced() {
  std::vector<std::shared_ptr<Fence>> asked;
  {
    std::lock_guard lock(mutex_);
    asked.swap(fences_);
  }
  if (asked.empty()) return;
  for (const auto& fence : asked) end_generations(fence->name, fence->generation);
  std::lock_guard lock(mutex_);
  for (const auto& fence : asked) fence->done = true;
  fenced_.notify_all();
}

void Target::tell_of_free_places() {
  for (const auto& [id, taken] : inbox_.owed()) {
    auto found = sessions_.find(id);
    if (found != sessions_.end() && !send(*found->second, encode(taken))) drop(id);
  }
}

uint64_t Target::attend() {
  end_fenced();
  tell_of_free_places();
  uint64_t now = driver::now_ns();
  uint64_t next = ~uint64_t{0};
  if (rest_until_ns_ != 0 && now >= rest_until_ns_) {
    rest_until_ns_ = 0;
    (void)poller_.change(listener_.get(), Poller::kListener, EPOLLIN);
  }
  if (rest_until_ns_ != 0) next = rest_until_ns_;
  if (strangers_ == 0) return next;
  std::vector<uint64_t> late;
  for (const auto& [id, session] : sessions_) {
    if (session->deadline_ns == 0) continue;
    if (now >= session->deadline_ns) {
      late.push_back(id);
    } else {
      next = std::min(next, session->deadline_ns);
    }
  }
  for (uint64_t id : late) drop(id);
  return next;
}

void Target::drop(uint64_t id) {
  auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  std::unique_ptr<Session> last = std::move(found->second);
  sessions_.erase(found);
  if (last->deadline_ns != 0) --strangers_;
  poller_.remove(last->channel.fd());
  end_queue_pairs(*last);
}

void Target::close() {
  for (auto& [id, session] : sessions_) end_queue_pairs(*session);
  sessions_.clear();
  listener_.reset();
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  end_fenced();
}

}  // namespace mooncake::verbs
