#include "channel.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "socket.hpp"

namespace mooncake {

namespace {

constexpr uint8_t kVersion = 1;
enum Type : uint8_t { kTypeHello = 1, kTypeHelloAck, kTypeRequest, kTypeReply, kTypeError, kTypeNotify };

struct Header {
  uint32_t body_length;
  uint8_t version;
  uint8_t type;
  uint16_t method_length;
  uint64_t request;
};
static_assert(sizeof(Header) == 16);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

constexpr size_t kReadChunk = 64 << 10;
constexpr size_t kMaxUnsent = 256u << 20;
constexpr uint64_t kListenerTag = 0;  // link ids begin at 1
constexpr uint64_t kWakeTag = ~uint64_t{0};

std::chrono::steady_clock::time_point time_point(uint64_t deadline_ns) {
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(deadline_ns));
}

}  // namespace

// A request of this side that has not been answered yet.
struct Channel::Call {
  bool done = false;
  bool remote_failed = false;
  Status status;
  std::string body;
};

struct Channel::Link {
  Link(Descriptor connected, uint64_t id, bool outgoing, std::string label)
      : socket(std::move(connected)), fd(socket.get()), id(id), outgoing(outgoing), label(std::move(label)) {}

  const Descriptor socket;
  const int fd;
  const uint64_t id;
  const bool outgoing;
  const std::string label;
  std::string received;  // touched by the loop only
  bool greeted = false;  // likewise

  std::mutex mutex;
  std::condition_variable answered;
  std::string unsent;
  size_t sent = 0;  // of `unsent`
  std::map<uint64_t, std::shared_ptr<Call>> calls;
  bool closed = false;
  std::string reason;
  std::string hello;  // of an incoming connection
  size_t open_requests = 0;
  bool lost_pending = false;
};

// ---- queues

void Channel::Queue::push(Event event) {
  std::lock_guard lock(mutex_);
  if (closed_) return;
  events_.push_back(std::move(event));
  ready_.notify_one();
}

bool Channel::Queue::pop(uint64_t deadline_ns, Event* event) {
  std::unique_lock lock(mutex_);
  ready_.wait_until(lock, time_point(deadline_ns), [&] { return closed_ || !events_.empty(); });
  if (events_.empty()) return false;
  *event = std::move(events_.front());
  events_.pop_front();
  return true;
}

void Channel::Queue::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  events_.clear();
  ready_.notify_all();
}

// ---- life

Channel::Channel()
    : epoll_fd_(epoll_create1(EPOLL_CLOEXEC)), wake_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {}

Channel::~Channel() {
  close();
  ::close(epoll_fd_);
  ::close(wake_fd_);
}

Status Channel::listen(const std::string& host, uint16_t port) {
  if (epoll_fd_ < 0 || wake_fd_ < 0) return Status::error(Code::kIo, "no descriptor left; raise `ulimit -n`");
  return listen_on(host, port, &listener_, &port_);
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
  loop_ = std::thread([this] { run(); });
  return {};
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
  for (const LinkPtr& link : links) drop(link, "this engine was closed");
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
  auto link = std::make_shared<Link>(std::move(socket), next_id_++, true, host + ":" + std::to_string(port));
  add_link(link);
  std::string failure;
  status = ask(link, kTypeHello, "", hello_, deadline_ns, hello, &failure);
  if (!status.ok()) {
    disconnect(link->id);
    status.reason = "no Mooncake engine answers at " + link->label + ": " + status.reason;
    return status;
  }
  *connection = link->id;
  return {};
}

Status Channel::call(uint64_t connection, const std::string& method, const std::string& body,
                     uint64_t deadline_ns, std::string* reply, std::string* remote_error) {
  LinkPtr link = find(connection);
  if (!link) return Status::error(Code::kUnreachable, "the connection to the peer has ended");
  return ask(link, kTypeRequest, method, body, deadline_ns, reply, remote_error);
}

Status Channel::ask(const LinkPtr& link, uint8_t type, const std::string& method, const std::string& body,
                    uint64_t deadline_ns, std::string* reply, std::string* remote_error) {
  uint64_t request = next_id_++;
  auto call = std::make_shared<Call>();
  {
    std::lock_guard lock(link->mutex);
    if (link->closed) return Status::error(Code::kUnreachable, link->label + ": " + link->reason);
    link->calls.emplace(request, call);
  }
  Status sent = send(link, type, request, method, body);
  std::unique_lock lock(link->mutex);
  if (sent.ok() && !link->answered.wait_until(lock, time_point(deadline_ns), [&] { return call->done; })) {
    sent = Status::error(Code::kTimeout, link->label + " gave no answer in time");
  }
  link->calls.erase(request);
  if (!sent.ok()) return sent;
  if (call->remote_failed) {
    *remote_error = std::move(call->body);
  } else {
    *reply = std::move(call->body);
  }
  return call->status;
}

Status Channel::notify(uint64_t connection, const std::string& method, const std::string& body) {
  LinkPtr link = find(connection);
  if (!link) return Status::error(Code::kUnreachable, "the connection to the peer has ended");
  return send(link, kTypeNotify, 0, method, body);
}

bool Channel::alive(uint64_t connection) {
  LinkPtr link = find(connection);
  if (!link) return false;
  std::lock_guard lock(link->mutex);
  return !link->closed;
}

void Channel::disconnect(uint64_t connection) {
  // The loop sees the end of the stream and drops the link.
  if (LinkPtr link = find(connection)) ::shutdown(link->fd, SHUT_RDWR);
}

// ---- answering

Status Channel::hello_of(uint64_t connection, std::string* hello) {
  LinkPtr link = find(connection);
  if (!link) return Status::error(Code::kUnreachable, "the peer that asked is gone");
  std::lock_guard lock(link->mutex);
  *hello = link->hello;
  return {};
}

Status Channel::reply(uint64_t connection, uint64_t request, bool failed, const std::string& body) {
  LinkPtr link = find(connection);
  if (!link) return Status::error(Code::kUnreachable, "the peer that asked is gone");
  Status status = send(link, failed ? kTypeError : kTypeReply, request, "", body);
  answered(link);
  return status;
}

void Channel::answered(const LinkPtr& link) {
  std::lock_guard lock(link->mutex);
  if (link->open_requests == 0) return;  // answered twice
  if (--link->open_requests != 0 || !link->lost_pending) return;
  link->lost_pending = false;
  events_.push({Event::Kind::kLost, link->id, 0, "", link->reason});
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
  if (epoll_ctl(epoll_fd_, EPOLL_CTL_ADD, link->fd, &event) != 0)
    drop(link, std::string("cannot be watched: ") + strerror(errno));
}

Status Channel::send(const LinkPtr& link, uint8_t type, uint64_t request, const std::string& method,
                     const std::string& body) {
  if (body.size() > kMaxBody || method.size() > UINT16_MAX) {
    return Status::error(Code::kInvalid, "a message of " + std::to_string(body.size()) +
                                             " bytes is over the limit of " + std::to_string(kMaxBody) +
                                             "; move bulk data with a transfer");
  }
  Header header{static_cast<uint32_t>(body.size()), kVersion, type, static_cast<uint16_t>(method.size()),
                request};
  std::lock_guard lock(link->mutex);
  if (link->closed) return Status::error(Code::kUnreachable, link->label + ": " + link->reason);
  if (link->unsent.size() - link->sent > kMaxUnsent) {
    return Status::error(Code::kUnreachable,
                         link->label + " does not read its messages; 256 MiB are waiting for it");
  }
  link->unsent.append(reinterpret_cast<const char*>(&header), sizeof(header));
  link->unsent.append(method).append(body);
  if (!flush(*link)) return Status::error(Code::kUnreachable, link->label + ": " + strerror(errno));
  return {};
}

bool Channel::flush(Link& link) {
  while (link.sent < link.unsent.size()) {
    ssize_t n = ::send(link.fd, link.unsent.data() + link.sent, link.unsent.size() - link.sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno != EAGAIN) return false;  // the loop drops the link at its next event
    if (n < 0) break;
    link.sent += static_cast<size_t>(n);
  }
  bool all = link.sent == link.unsent.size();
  if (all) {
    link.unsent.clear();
    link.sent = 0;
  } else if (link.sent > link.unsent.size() / 2) {
    // A peer that never quite keeps up must not make us keep all that was ever sent to it.
    link.unsent.erase(0, std::exchange(link.sent, 0));
  }
  epoll_event event{};
  event.events = EPOLLIN | (all ? 0u : static_cast<uint32_t>(EPOLLOUT));
  event.data.u64 = link.id;
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, link.fd, &event);
  return true;
}

void Channel::drop(const LinkPtr& link, const std::string& reason) {
  epoll_ctl(epoll_fd_, EPOLL_CTL_DEL, link->fd, nullptr);
  std::lock_guard lock(link->mutex);
  if (link->closed) return;
  link->closed = true;
  link->reason = reason;
  ::shutdown(link->fd, SHUT_RDWR);
  for (auto& [request, call] : link->calls) {
    call->status = Status::error(closing_ ? Code::kClosed : Code::kUnreachable, link->label + ": " + reason);
    call->done = true;
  }
  link->answered.notify_all();
  bool waits_for_answers = link->open_requests != 0;
  if (!link->outgoing && link->greeted) {
    link->lost_pending = waits_for_answers;
    if (!waits_for_answers) events_.push({Event::Kind::kLost, link->id, 0, "", reason});
  }
  if (waits_for_answers) return;  // answered() removes it
  std::lock_guard map_lock(mutex_);
  links_.erase(link->id);
}

// ---- the loop

void Channel::run() {
  epoll_event events[64];
  while (!closing_) {
    int count = epoll_wait(epoll_fd_, events, 64, 1000);
    for (int i = 0; i < count && !closing_; ++i) {
      uint64_t tag = events[i].data.u64;
      if (tag == kListenerTag) {
        accept_all();
      } else if (tag != kWakeTag) {
        if (LinkPtr link = find(tag)) on_ready(link, events[i].events);
      }
    }
  }
}

void Channel::accept_all() {
  for (;;) {
    Descriptor socket(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.valid()) {
      // Out of descriptors: the listener stays readable, so do not spin on it.
      if (errno == EMFILE || errno == ENFILE) usleep(10'000);
      return;
    }
    tune_stream(socket.get());
    uint64_t id = next_id_++;
    add_link(std::make_shared<Link>(std::move(socket), id, false, "connection " + std::to_string(id)));
  }
}

void Channel::on_ready(const LinkPtr& link, uint32_t events) {
  if (events & EPOLLOUT) {
    std::unique_lock lock(link->mutex);
    if (!flush(*link)) {
      std::string reason = strerror(errno);
      lock.unlock();
      drop(link, reason);
      return;
    }
  }
  if (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) read_frames(link);
}

bool Channel::read_frames(const LinkPtr& link) {
  std::string& in = link->received;
  size_t before = in.size();
  in.resize(before + kReadChunk);
  ssize_t n = recv(link->fd, in.data() + before, kReadChunk, 0);
  int error = errno;
  in.resize(before + static_cast<size_t>(n > 0 ? n : 0));
  if (n < 0 && (error == EAGAIN || error == EINTR)) return true;
  if (n <= 0) {
    drop(link, n == 0 ? "the peer closed the connection" : strerror(error));
    return false;
  }
  size_t used = 0;
  while (in.size() - used >= sizeof(Header)) {
    Header header;
    memcpy(&header, in.data() + used, sizeof(header));
    if (header.version != kVersion || header.body_length > kMaxBody) {
      drop(link, "the peer does not speak version 1 of the channel protocol");
      return false;
    }
    size_t size = sizeof(header) + header.method_length + header.body_length;
    if (in.size() - used < size) break;
    std::string method = in.substr(used + sizeof(header), header.method_length);
    std::string body = in.substr(used + sizeof(header) + header.method_length, header.body_length);
    used += size;
    if (!on_frame(link, header.type, header.request, std::move(method), std::move(body))) return false;
  }
  in.erase(0, used);
  return true;
}

bool Channel::on_frame(const LinkPtr& link, uint8_t type, uint64_t request, std::string method,
                       std::string body) {
  bool answer = type == kTypeHelloAck || type == kTypeReply || type == kTypeError;
  if (answer && link->outgoing) {
    std::lock_guard lock(link->mutex);
    auto found = link->calls.find(request);
    if (found == link->calls.end()) return true;  // it gave up waiting
    Call& call = *found->second;
    call.remote_failed = type == kTypeError;
    call.body = std::move(body);
    call.done = true;
    link->answered.notify_all();
    return true;
  }
  if (type == kTypeHello && !link->outgoing && !link->greeted) {
    link->greeted = true;
    {
      std::lock_guard lock(link->mutex);
      link->hello = body;
    }
    events_.push({Event::Kind::kHello, link->id, 0, "", std::move(body)});
    return send(link, kTypeHelloAck, request, "", hello_).ok();
  }
  if ((type == kTypeRequest || type == kTypeNotify) && link->greeted) {
    if (type == kTypeNotify) {
      events_.push({Event::Kind::kNotify, link->id, 0, std::move(method), std::move(body)});
      return true;
    }
    {
      std::lock_guard lock(link->mutex);
      ++link->open_requests;
    }
    requests_.push({Event::Kind::kRequest, link->id, request, std::move(method), std::move(body)});
    return true;
  }
  drop(link, "the peer broke the channel protocol (frame type " + std::to_string(type) + ")");
  return false;
}

}  // namespace mooncake
