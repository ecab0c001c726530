// The channel's thread: accepts, reads frames, sends what the sockets did not take at once, and drops who is
// silent.
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "channel.hpp"

namespace mooncake {

namespace {

constexpr size_t kReadChunk = 64 << 10;
constexpr int kChunksPerTurn = 16;  // of one link, before the others get their turn
constexpr uint32_t kMaxHello = 256 << 10;
constexpr size_t kMaxReason = 500;
constexpr size_t kMaxBacklog = 8192;  // events that nobody has taken yet, at which no one new is let in
constexpr int kToldPerTick = 10;  // refusals told as events; a flood of them must not become a flood of those
constexpr uint64_t kRefusedForGood = 1;
constexpr uint64_t kTickNs = 1'000'000'000;
constexpr uint64_t kAcceptPauseNs = 100'000'000;

uint64_t to_ns(double seconds) { return static_cast<uint64_t>(seconds * 1e9); }

Status broken_protocol(const std::string& what) {
  return Status::error(Code::kUnreachable, "the peer broke the channel protocol (" + what + ")");
}

// Whether these can be the first bytes of TLS. No hello of a plain engine begins so: it would be 65 KiB long.
bool looks_like_tls(const uint8_t* head, size_t size) {
  return head[0] == kTlsHandshake && (size < 2 || head[1] == kTlsMajor) &&
         (size < 3 || (head[2] >= 1 && head[2] <= 4));
}

// What a stranger wrote, fit for a message.
std::string printable(const std::string& text) {
  std::string clean = text.substr(0, kMaxReason);
  for (char& c : clean) {
    if (c < 0x20 || c > 0x7e) c = '?';
  }
  return clean;
}

}  // namespace

void Channel::run() {
  epoll_event events[64];
  scratch_.resize(kReadChunk);
  loop_id_ = std::this_thread::get_id();
  while (!closing_) {
    int count = epoll_wait(epoll_fd_, events, 64, wait_ms());
    for (int i = 0; i < count && !closing_; ++i) {
      uint64_t tag = events[i].data.u64;
      if (tag == kListenerTag) {
        accept_all();
      } else if (tag == kWakeTag) {
        eventfd_t ignored;
        eventfd_read(wake_fd_, &ignored);
        std::lock_guard lock(mutex_);
        again_.insert(again_.end(), resumed_.begin(), resumed_.end());
        resumed_.clear();
      } else if (LinkPtr link = find(tag)) {
        on_ready(link, events[i].events);
      }
    }
    for (uint64_t id : std::exchange(again_, {})) {
      if (LinkPtr link = find(id)) read_frames(link);
    }
    if (now_ns() >= next_tick_ns_) tick();
  }
}

int Channel::wait_ms() { return again_.empty() && !looks_out() ? poll_timeout_ms(next_tick_ns_) : 0; }

void Channel::tick() {
  uint64_t now = now_ns();
  while (!ungreeted_.empty() && ungreeted_.begin()->second <= now) {
    uint64_t id = ungreeted_.begin()->first;
    ungreeted_.erase(id);
    if (LinkPtr link = find(id)) refuse(link, Status::error(Code::kUnreachable, "no hello came in time"));
  }
  if (accept_again_ns_ != 0 && accept_again_ns_ <= now) watch_listener(true);
  drop_silent_links();
  refused_since_tick_ = 0;
  next_tick_ns_ = now + kTickNs;
  if (!ungreeted_.empty()) next_tick_ns_ = std::min(next_tick_ns_, ungreeted_.begin()->second);
  if (accept_again_ns_ != 0) next_tick_ns_ = std::min(next_tick_ns_, accept_again_ns_);
}

// A host that is gone acknowledges nothing. One whose process is stopped or slow does, and keeps its
// connection: that is why this is not left to TCP_USER_TIMEOUT, which cannot tell them apart. Idle
// connections have keep-alive probes.
void Channel::drop_silent_links() {
  std::vector<LinkPtr> links;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, link] : links_) links.push_back(link);
  }
  for (const LinkPtr& link : links) {
    tcp_info info{};
    socklen_t length = sizeof(info);
    if (getsockopt(link->fd, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) continue;
    bool owed = info.tcpi_unacked > 0 || info.tcpi_probes > 0;
    if (!owed) link->owed_since_ns = 0;
    if (!owed || info.tcpi_last_ack_recv <= limits_.silence_s * 1e3) continue;
    // Probes of a window that is closed may lie further apart than the limit: the last one gets its time,
    // too.
    if (link->owed_since_ns == 0) link->owed_since_ns = now_ns();
    if (now_ns() - link->owed_since_ns < kTickNs) continue;
    drop(link, Status::error(Code::kUnreachable, "its host has not answered for " +
                                                     std::to_string(info.tcpi_last_ack_recv / 1000) +
                                                     " s; the host or the network between is gone"));
  }
}

// ---- new connections

void Channel::watch_listener(bool watched) {
  epoll_event event{};
  event.events = watched ? static_cast<uint32_t>(EPOLLIN) : 0u;
  event.data.u64 = kListenerTag;
  epoll_ctl(epoll_fd_, EPOLL_CTL_MOD, listener_.get(), &event);
  accept_again_ns_ = watched ? 0 : now_ns() + kAcceptPauseNs;
  if (!watched) next_tick_ns_ = std::min(next_tick_ns_, accept_again_ns_);
}

void Channel::accept_all() {
  for (int taken = 0; taken < 64; ++taken) {  // then the others get their turn
    if (events_.size() > kMaxBacklog) return watch_listener(false);
    sockaddr_storage from{};
    socklen_t length = sizeof(from);
    Descriptor socket(
        accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from), &length, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (!socket.valid()) {
      if (errno == EAGAIN) return;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      // Out of descriptors or memory: the listener stays readable, so look away for a while.
      tell_refused(0, std::string("connections wait to be accepted: ") + strerror(errno) +
                          (errno == EMFILE ? "; raise `ulimit -n`" : ""));
      return watch_listener(false);
    }
    tune_stream(socket.get(), limits_.silence_s);
    make_room_for_strangers();
    uint64_t id = next_id_++;
    ungreeted_.emplace(id, now_ns() + to_ns(limits_.greeting_s));
    next_tick_ns_ = std::min(next_tick_ns_, ungreeted_.begin()->second);
    add_link(std::make_shared<Link>(std::move(socket), id, false, where(from)));
  }
}

void Channel::make_room_for_strangers() {
  while (ungreeted_.size() >= std::max<size_t>(1, limits_.ungreeted)) {
    uint64_t oldest = ungreeted_.begin()->first;
    ungreeted_.erase(oldest);
    if (LinkPtr link = find(oldest))
      refuse(link, Status::error(Code::kUnreachable, "too many connections without a hello"));
  }
}

// Ends a connection that has not been greeted, and says so: to the peer in plain if it can be understood
// there, and here as an event.
void Channel::refuse(const LinkPtr& link, const Status& why) {
  {
    std::lock_guard lock(link->mutex);
    if (!link->closed && !link->session && (!tls_ || why.code == Code::kUntrusted)) {
      link->send_frame(kTypeRefuse, why.code == Code::kUntrusted ? kRefusedForGood : 0, "", why.reason);
      // What was not read would turn the end of the connection into a reset, and the reason might get lost.
      for (int i = 0; i < kChunksPerTurn && recv(link->fd, scratch_.data(), kReadChunk, 0) > 0; ++i) {
      }
    }
  }
  tell_refused(link->id, link->label + ": " + why.reason);
  drop(link, why);
}

void Channel::tell_refused(uint64_t connection, std::string text) {
  if (++refused_since_tick_ <= kToldPerTick)
    events_.push({Event::Kind::kRefused, connection, 0, "", std::move(text)});
}

bool Channel::open_session(const LinkPtr& link) {
  std::unique_lock lock(link->mutex);
  Status why;
  if (!link->session) {
    uint8_t head[3] = {};
    ssize_t peeked = recv(link->fd, head, sizeof(head), MSG_PEEK);
    if (peeked > 0 && !looks_like_tls(head, static_cast<size_t>(peeked))) {
      lock.unlock();
      refuse(link,
             Status::error(Code::kUntrusted,
                           "it does not use TLS and this engine does; set `tls` for both or for neither"));
      return false;
    }
    link->session.emplace(tls::Session::accept(*tls_, link->fd));
    link->shaking_hands = true;
  }
  Link::Io io = link->shake_hands(&why);
  link->watch(epoll_fd_);
  if (io == Link::Io::kSome) return true;
  lock.unlock();
  if (io == Link::Io::kEnded) {
    tell_refused(link->id, link->label + ": " + why.reason);
    drop(link, why);
  }
  return false;
}

void Channel::drop(const LinkPtr& link, const Status& why) {
  ungreeted_.erase(link->id);
  lose(link, why);
}

// ---- frames

void Channel::on_ready(const LinkPtr& link, uint32_t events) {
  bool fresh = tls_ != nullptr && !link->outgoing && !link->greeted;
  bool shaking, paused, reads_to_write;
  {
    std::lock_guard lock(link->mutex);
    shaking = fresh && (!link->session || link->shaking_hands);
    paused = link->paused;
    reads_to_write = link->wants_write;
    if (!shaking && link->waiting_bytes() > 0) {
      link->flush();  // when it is broken, reading tells why
      settle(*link);
    }
  }
  if (shaking && !open_session(link)) return;
  if (paused && (events & (EPOLLHUP | EPOLLERR)) != 0) {
    // Not read from, so it would be reported for ever.
    drop(link, Status::error(Code::kUnreachable, "the peer closed the connection"));
  } else if (!paused && (shaking || reads_to_write || (events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0)) {
    read_frames(link);
  }
}

void Channel::read_frames(const LinkPtr& link) {
  std::lock_guard reading(link->reading);
  for (int turn = 0; turn < kChunksPerTurn; ++turn) {
    if (!take_frames(link)) return;
    size_t bytes = 0;
    Status why;
    Link::Io io;
    {
      std::lock_guard lock(link->mutex);
      if (link->closed || link->paused) return;
      io = link->receive(scratch_.data(), kReadChunk, &bytes, &why);
      link->watch(epoll_fd_);
    }
    if (io == Link::Io::kNothing) return;
    if (io == Link::Io::kEnded) {
      if (why.code == Code::kUntrusted) tell_refused(link->id, link->label + ": " + why.reason);
      return drop(link, why);
    }
    link->received.append(scratch_, 0, bytes);
    // Without TLS the kernel says when there is more; a full chunk makes that likely now.
    if (bytes < kReadChunk && !link->session) {
      take_frames(link);
      return;
    }
  }
  if (take_frames(link)) again_.push_back(link->id);
}

// Handles what is complete. False when there is nothing to read for now: the link was dropped or paused, or
// has something that only the loop may handle.
bool Channel::take_frames(const LinkPtr& link, bool polling) {
  std::string& in = link->received;
  size_t used = 0;
  bool goes_on = true;
  while (goes_on && in.size() - used >= sizeof(FrameHeader)) {
    FrameHeader header;
    memcpy(&header, in.data() + used, sizeof(header));
    goes_on = polling ? pollable(*link, header) : admissible(link, header);
    if (!goes_on) break;
    size_t size = sizeof(header) + header.method_length + header.body_length;
    if (in.size() - used < size) break;
    std::string method = in.substr(used + sizeof(header), header.method_length);
    std::string body = in.substr(used + sizeof(header) + header.method_length, header.body_length);
    used += size;
    goes_on = on_frame(link, header, std::move(method), std::move(body));
  }
  in.erase(0, used);
  if (in.empty() && in.capacity() > kKeptBuffer) in.shrink_to_fit();
  return goes_on;
}

// Whether the frame may come now; judged by its header, before memory is given to its body.
bool Channel::admissible(const LinkPtr& link, const FrameHeader& header) {
  uint8_t head[3];
  memcpy(head, &header, sizeof(head));
  bool stranger = !link->outgoing && !link->greeted;
  Status why;
  if (stranger && looks_like_tls(head, sizeof(head))) {
    why = Status::error(Code::kUntrusted,
                        "it uses TLS and this engine does not; set `tls` for both or for neither");
  } else if (header.version != kFrameVersion || header.body_length > kMaxBody) {
    why = Status::error(Code::kUnreachable, "the peer does not speak version 1 of the channel protocol");
  } else {
    bool answer = header.type == kTypeHelloAck || header.type == kTypeReply || header.type == kTypeError ||
                  header.type == kTypeRefuse;
    bool question = header.type == kTypeRequest || header.type == kTypeNotify;
    bool expected = link->outgoing ? answer : stranger ? header.type == kTypeHello : question;
    if (!expected) why = broken_protocol("frame type " + std::to_string(header.type));
    if (stranger && header.body_length > kMaxHello) why = broken_protocol("a hello of over 256 KiB");
  }
  if (why.ok()) return true;
  if (stranger) {
    refuse(link, why);
  } else {
    drop(link, why);
  }
  return false;
}

bool Channel::on_frame(const LinkPtr& link, const FrameHeader& header, std::string method, std::string body) {
  if (link->outgoing) return on_answer(link, header, std::move(body));
  if (header.type == kTypeHello) return greet(link, header, std::move(body));
  if (header.type == kTypeRequest && give_token(link, header, method)) return true;
  if (header.type == kTypeNotify) fetch_notices();  // those that were delivered before it was sent go first
  if (header.type == kTypeRequest) {
    if (auto* handler = compiled(method)) return answer_compiled(*handler, link, header.request, body);
  }
  std::lock_guard lock(link->mutex);
  if (link->closed) return false;
  if (header.type == kTypeNotify) {
    take_notification(*link, std::move(method), std::move(body));
  } else {
    link->queued_messages += 1;
    link->queued_bytes += method.size() + body.size() + kEventOverhead;
    ++link->open_requests;
    bool own = own_methods_.count(method) != 0;
    requests_.push({Event::Kind::kRequest, link->id, header.request, std::move(method), std::move(body)},
                   own);
  }
  settle(*link);
  return !link->paused;
}

bool Channel::on_answer(const LinkPtr& link, const FrameHeader& header, std::string body) {
  if (header.type == kTypeRefuse) {
    Code code = header.request == kRefusedForGood ? Code::kUntrusted : Code::kUnreachable;
    drop(link, Status::error(code, "it refuses this engine: " + printable(body)));
    return false;
  }
  std::lock_guard lock(link->mutex);
  auto found = link->calls.find(header.request);
  if (found == link->calls.end()) return true;  // it gave up waiting
  PendingCall& call = *found->second;
  if (call.then) {
    if (header.type == kTypeReply) call.then(body);
    link->calls.erase(found);
    return true;
  }
  call.remote_failed = header.type == kTypeError;
  call.body = std::move(body);
  call.done = true;
  call.answered.notify_all();
  return true;
}

bool Channel::greet(const LinkPtr& link, const FrameHeader& header, std::string body) {
  ungreeted_.erase(link->id);
  {
    std::lock_guard lock(link->mutex);
    link->greeted = true;
    link->hello = body;
  }
  events_.push({Event::Kind::kHello, link->id, 0, "", std::move(body)});
  // When that fails, reading tells why.
  send(link, kTypeHelloAck, header.request, "", hello_);
  return true;
}

}  // namespace mooncake
