#include "channel.hpp"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "interrupt.hpp"
#include "threads.hpp"

namespace mooncake {

namespace {

std::chrono::steady_clock::time_point time_point(uint64_t deadline_ns) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
}

// How long an answer, and the next request of a peer that has just been answered, are polled for: somewhat
// longer than a peer takes to wake up and answer.
constexpr uint64_t kAnswerNs = 150'000;
constexpr uint64_t kNextRequestNs = 100'000;

Status gone() { return Status::error(Code::kUnreachable, "the connection to the peer has ended"); }

std::string mib(size_t bytes) { return std::to_string(bytes >> 20) + " MiB"; }

}  // namespace

// ---- queues

void Channel::Queue::push(Event event, bool own) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  (own ? own_ : events_).push_back(std::move(event));
  waiting_ = events_.size() + own_.size();
  ready_.notify_one();
  if (own) own_ready_.notify_one();  // whoever of the two is first
}

bool Channel::Queue::pop(uint64_t deadline_ns, Event* event, bool own) {
  std::unique_lock lock(mutex_);
  auto any = [&] { return !own_.empty() || (!own && !events_.empty()); };
  (own ? own_ready_ : ready_).wait_until(lock, time_point(deadline_ns), [&] { return closed_ || any(); });
  if (!any()) return false;
  // The others first: the engine's own have a thread that takes nothing else.
  auto& from = own || events_.empty() ? own_ : events_;
  *event = std::move(from.front());
  from.pop_front();
  waiting_ = events_.size() + own_.size();
  return true;
}

void Channel::Queue::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  events_.clear();
  own_.clear();
  waiting_ = 0;
  ready_.notify_all();
  own_ready_.notify_all();
}

size_t Channel::Queue::size() {
  std::lock_guard lock(mutex_);
  return events_.size() + own_.size();
}

// ---- life

Channel::Channel(ChannelLimits limits)
    : limits_(limits),
      epoll_fd_(epoll_create1(EPOLL_CLOEXEC)),
      wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Channel::~Channel() {
  close();
  ::close(epoll_fd_);
  ::close(wake_fd_);
}

Status Channel::use_tls(const tls::Files& files, bool verify_host) {
  std::string reason;
  tls_ = tls::Context::make(files, &reason);
  verify_host_ = verify_host;
  return tls_ ? Status{} : Status::error(Code::kInvalid, "TLS cannot be used: " + reason);
}

Status Channel::listen(const std::string& host, uint16_t port, uint16_t last_port) {
  if (epoll_fd_ < 0 || wake_fd_ < 0) return Status::error(Code::kIo, "no descriptor left; raise `ulimit -n`");
  return listen_on(host, port, last_port, &listener_, &port_);
}

Status Channel::start(std::string hello) {
  hello_ = std::move(hello);
  for (auto [fd, tag] : {std::pair{listener_.get(), kListenerTag}, std::pair{wake_fd_, kWakeTag}}) {
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.u64 = tag;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, fd, &event) != 0) {
      return Status::error(Code::kIo, std::string("cannot watch the listener: ") + strerror(errno));
    }
  }
  return start_thread(&loop_, "the channel", [this] { run(); });
}

void Channel::close() {
  if (closing_.exchange(true)) return;
  if (getpid() != owner_) {  // a forked child: the loop runs in the parent only
    if (loop_.joinable()) loop_.detach();
    return;
  }
  [[maybe_unused]] int ignored = eventfd_write(wake_fd_, 1);
  if (loop_.joinable()) loop_.join();
  listener_.reset();
  std::vector<LinkPtr> links;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, link] : links_) links.push_back(link);
  }
  for (const LinkPtr& link : links) lose(link, Status::error(Code::kClosed, "this engine was closed"));
  {
    std::lock_guard lock(mutex_);
    links_.clear();
  }
  requests_.close();
  events_.close();
}

// ---- asking

Status Channel::connect(const std::string& host, uint16_t port, uint64_t deadline_ns, uint64_t* connection,
                        std::string* hello) {
  Descriptor socket;
  Status status = connect_to(host, port, deadline_ns, &socket);
  if (!status.ok()) return status;
  tune_stream(socket.get(), limits_.silence_s);
  auto link = std::make_shared<Link>(std::move(socket), next_id_++, true, where(host, port));
  status = secure(*link, host, deadline_ns);
  if (status.ok()) {
    add_link(link);
    std::string failure;
    status = ask(link, kTypeHello, "", hello_, deadline_ns, hello, &failure);
    if (!status.ok()) disconnect(link->id);
  }
  if (!status.ok()) {
    status.reason = "no Mooncake engine answers at " + link->label + ": " + status.reason;
    return status;
  }
  *connection = link->id;
  return {};
}

// The connecting side's part of the TLS handshake, before the loop knows the link.
Status Channel::secure(Link& link, const std::string& host, uint64_t deadline_ns) {
  if (!tls_) return {};
  std::lock_guard lock(link.mutex);
  // Certificates are for addresses; the interface after a link-local one is only good on this machine.
  std::string certified = verify_host_ ? host.substr(0, host.find('%')) : "";
  link.session.emplace(tls::Session::connect(*tls_, link.fd, certified));
  link.shaking_hands = true;
  Status why;
  for (;;) {
    Link::Io io = link.shake_hands(&why);
    if (io == Link::Io::kSome) return {};
    if (link.session->meets_plain())
      why.reason = "it does not use TLS and this engine does; set `tls` for both or for neither";
    if (io == Link::Io::kEnded) return why;
    pollfd waiting{link.fd, static_cast<short>(link.wants_write ? POLLOUT : POLLIN), 0};
    uint64_t until = slice_until(deadline_ns);
    bool ready = ::poll(&waiting, 1, poll_timeout_ms(until)) > 0;
    if (!ready && (now_ns() >= deadline_ns || (interrupted != nullptr && interrupted())))
      return Status::error(Code::kTimeout, "the TLS handshake did not end in time");
  }
}

Status Channel::call(uint64_t connection, const std::string& method, const std::string& body,
                     uint64_t deadline_ns, std::string* reply, std::string* remote_error) {
  LinkPtr link = find(connection);
  return link ? ask(link, kTypeRequest, method, body, deadline_ns, reply, remote_error) : gone();
}

Status Channel::ask(const LinkPtr& link, uint8_t type, const std::string& method, const std::string& body,
                    uint64_t deadline_ns, std::string* reply, std::string* remote_error) {
  uint64_t request = next_id_++;
  auto call = std::make_shared<PendingCall>();
  std::unique_lock lock(link->mutex);
  Status status = wait_for_room(lock, *link, deadline_ns);
  if (status.ok() && link->closed) status = {link->end.code, link->label + ": " + link->end.reason};
  if (!status.ok()) return status;
  link->calls.emplace(request, call);
  status = send_locked(*link, type, request, method, body);
  // When the connection broke, the loop finds out why and ends the call.
  bool waits = status.ok() || status.code == Code::kUnreachable;
  if (waits) {
    lock.unlock();
    poll(link, kAnswerNs, [&] { return call->done.load(); }, deadline_ns);
    lock.lock();
    bool done = wait_until(call->answered, lock, deadline_ns, [&] { return call->done.load(); });
    status = done ? call->status : Status::error(Code::kTimeout, link->label + " gave no answer in time");
  }
  link->calls.erase(request);
  if (status.ok()) *(call->remote_failed ? remote_error : reply) = std::move(call->body);
  return status;
}

Status Channel::notify(uint64_t connection, const std::string& method, const std::string& body,
                       uint64_t deadline_ns) {
  LinkPtr link = find(connection);
  if (!link) return gone();
  std::unique_lock lock(link->mutex);
  Status status = wait_for_room(lock, *link, deadline_ns);
  return status.ok() ? send_locked(*link, kTypeNotify, 0, method, body) : status;
}

Status Channel::try_notify(uint64_t connection, const std::string& method, const std::string& body) {
  Status status = notify(connection, method, body, 0);
  if (status.code == Code::kTimeout) status.code = Code::kNoMemory;
  return status;
}

bool Channel::alive(uint64_t connection) {
  if (origin_.forked()) return false;  // a lock may be held for ever
  LinkPtr link = find(connection);
  if (!link) return false;
  std::lock_guard lock(link->mutex);
  return !link->closed;
}

void Channel::disconnect(uint64_t connection) {
  if (origin_.forked()) return;  // the parent goes on with it
  LinkPtr link = find(connection);
  if (!link) return;
  std::lock_guard lock(link->mutex);
  if (link->ended.empty()) link->ended = "this side closed the connection";
  if (link->session) link->session->say_goodbye();
  ::shutdown(link->fd, SHUT_RDWR);  // the loop sees the end of the stream and drops the link
}

// ---- answering

Status Channel::hello_of(uint64_t connection, std::string* hello) {
  LinkPtr link = find(connection);
  if (!link) return Status::error(Code::kUnreachable, "the peer that asked is gone");
  std::lock_guard lock(link->mutex);
  *hello = link->hello;
  return {};
}

std::string Channel::certificate_of(uint64_t connection) {
  LinkPtr link = find(connection);
  if (!link) return {};
  std::lock_guard lock(link->mutex);
  return link->session ? link->session->peer_certificate() : std::string();
}

bool Channel::next_request(uint64_t deadline_ns, Event* event, uint64_t after, bool own) {
  if (LinkPtr link = after != 0 && requests_.empty() ? find(after) : nullptr)
    poll(link, kNextRequestNs, [this] { return !requests_.empty(); });
  if (!requests_.pop(deadline_ns, event, own)) return false;
  taken(*event);
  return true;
}

bool Channel::next_event(uint64_t deadline_ns, Event* event) {
  if (!events_.pop(deadline_ns, event)) return false;
  if (event->kind == Event::Kind::kNotify) taken(*event);
  return true;
}

void Channel::taken(const Event& event) {
  LinkPtr link = find(event.connection);
  if (!link) return;
  std::lock_guard lock(link->mutex);
  link->queued_messages -= 1;
  link->queued_bytes -= event.method.size() + event.body.size() + kEventOverhead;
  settle(*link);
}

Status Channel::reply(uint64_t connection, uint64_t request, bool failed, const std::string& body) {
  LinkPtr link = find(connection);
  if (!link) return Status::error(Code::kUnreachable, "the peer that asked is gone");
  Status status = send(link, failed ? kTypeError : kTypeReply, request, "", body);
  if (status.code == Code::kNoMemory) {
    status.code = Code::kUnreachable;
    lose(link, status);
  }
  if (status.code != Code::kInvalid) answered(link);  // else another answer is to come
  return status;
}

void Channel::answered(const LinkPtr& link) {
  std::lock_guard lock(link->mutex);
  if (link->open_requests == 0) return;  // answered twice
  if (--link->open_requests != 0 || !link->lost_pending) return;
  link->lost_pending = false;
  events_.push({Event::Kind::kLost, link->id, 0, "", link->end.reason});
  std::lock_guard map_lock(mutex_);
  links_.erase(link->id);
}

// ---- links

Channel::LinkPtr Channel::find(uint64_t connection) {
  std::lock_guard lock(mutex_);
  auto found = links_.find(connection);
  return found == links_.end() ? nullptr : found->second;
}

void Channel::add_link(const LinkPtr& link) {
  {
    std::lock_guard lock(mutex_);
    links_.emplace(link->id, link);
  }
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = link->id;
  {
    std::lock_guard lock(link->mutex);
    link->watched = event.events;
    if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, link->fd, &event) == 0) return;
  }
  lose(link, Status::error(Code::kUnreachable, std::string("cannot be watched: ") + strerror(errno)));
}

Status Channel::send(const LinkPtr& link, uint8_t type, uint64_t request, const std::string& method,
                     const std::string& body) {
  std::lock_guard lock(link->mutex);
  return send_locked(*link, type, request, method, body);
}

Status Channel::send_locked(Link& link, uint8_t type, uint64_t request, const std::string& method,
                            const std::string& body) {
  if (body.size() > kMaxBody || method.size() > UINT16_MAX) {
    return Status::error(Code::kInvalid, "a message of " + std::to_string(body.size()) +
                                             " bytes is over the limit of " + std::to_string(kMaxBody) +
                                             "; move bulk data with a transfer");
  }
  if (link.closed) return {link.end.code, link.label + ": " + link.end.reason};
  if (link.waiting_bytes() > limits_.max_answers) {
    return Status::error(Code::kNoMemory,
                         link.label + " does not read its answers; " + mib(link.waiting_bytes()) + " wait");
  }
  if (type == kTypeNotify) ++link.notified;
  bool sound = link.send_frame(type, request, method, body);
  int error = errno;
  settle(link);
  return sound ? Status{} : Status::error(Code::kUnreachable, link.label + ": " + strerror(error));
}

Status Channel::wait_for_room(std::unique_lock<std::mutex>& lock, Link& link, uint64_t deadline_ns) {
  auto has_room = [&] { return link.closed || link.waiting_bytes() <= limits_.unsent_bytes; };
  if (has_room() || (deadline_ns != 0 && wait_until(link.room, lock, deadline_ns, has_room))) return {};
  return Status::error(Code::kTimeout, link.label + " does not read what it is sent; " +
                                           mib(link.waiting_bytes()) + " wait for it");
}

// Decides anew whether to read from the link, and what to watch it for, after its queues have changed.
void Channel::settle(Link& link) {
  size_t waiting = link.waiting_bytes();
  if (!link.paused) {
    link.paused = link.queued_messages > limits_.queued_messages ||
                  link.queued_bytes > limits_.queued_bytes ||
                  (!link.outgoing && waiting > limits_.unsent_bytes);
  } else if (link.queued_messages <= limits_.queued_messages / 2 &&
             link.queued_bytes <= limits_.queued_bytes / 2 && waiting <= limits_.unsent_bytes / 2) {
    link.paused = false;
    resume(link);
  }
  if (waiting <= limits_.unsent_bytes / 2) link.room.notify_all();
  link.watch(epoll_fd_);
}

// The loop goes on reading: part of what follows may have been read already.
void Channel::resume(const Link& link) {
  std::lock_guard lock(mutex_);
  if (resumed_.empty()) [[maybe_unused]]
    int ignored = eventfd_write(wake_fd_, 1);
  resumed_.push_back(link.id);
}

void Channel::lose(const LinkPtr& link, const Status& why) {
  if (!link->outgoing) fetch_notices();  // what it sent before it ended
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, link->fd, nullptr);
  std::lock_guard lock(link->mutex);
  if (link->closed) return;
  link->closed = true;
  if (link->window) tokens_.take_back(link->id);
  link->end = closing_ ? Status::error(Code::kClosed, why.reason) : why;
  if (!link->ended.empty()) link->end.reason = link->ended;
  if (link->session && !link->shaking_hands) link->session->say_goodbye();
  ::shutdown(link->fd, SHUT_RDWR);
  for (auto& [request, call] : link->calls) {
    call->status = {link->end.code, link->label + ": " + link->end.reason};
    call->done = true;
    call->answered.notify_all();
  }
  link->room.notify_all();
  bool waits_for_answers = link->open_requests != 0;
  if (!link->outgoing && link->greeted) {
    link->lost_pending = waits_for_answers;
    if (!waits_for_answers) events_.push({Event::Kind::kLost, link->id, 0, "", link->end.reason});
  }
  if (waits_for_answers) return;  // answered() removes it
  std::lock_guard map_lock(mutex_);
  links_.erase(link->id);
}

}  // namespace mooncake
