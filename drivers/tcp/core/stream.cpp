#include "stream.hpp"

#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cassert>
#include <cerrno>

namespace mooncake_tcp {

namespace {

// One way, then the thread's other connections get their turn. Less for a thread of the engine, which has
// other things to do than moving bytes.
constexpr uint64_t kTurnBytes = 4u << 20;
constexpr uint64_t kHostTurnBytes = 1u << 20;
constexpr uint64_t kBulkBytes = 32u << 10;
constexpr int kMaxVectors = 64;
// Between two sockets of one machine, what is on its way should stay in the caches, where the second of the
// two copies finds it, and yet 1 MiB should fit at once. The kernel doubles the number. With a quarter of it
// 1 MiB takes 1.3 times as long, with twice as much the time varies more (measured, loopback, Linux 6.18).
// The receive buffer stays the system's: a small one overflows, and each drop there costs a retransmission
// timeout.
constexpr int kSameHostSendBuffer = 576 << 10;
// There is no network to be careful with. BBR, the default of some systems, sends by timers, and slows down
// now and then to measure; this one every kernel has and allows.
constexpr char kSameHostCongestion[] = "reno";

const std::byte kZeros[64 << 10] = {};
thread_local std::byte nowhere[64 << 10];

void set_option(int socket, int level, int name, int value) {
  // Each of these is an improvement, none is needed for correctness.
  [[maybe_unused]] int ignored = setsockopt(socket, level, name, &value, sizeof(value));
}

}  // namespace

void tune_socket(int socket, const Options& options, bool same_host) {
  set_option(socket, IPPROTO_TCP, TCP_NODELAY, 1);
  // A peer that vanished without a word ends unsent data by the user timeout, and silence by the probes.
  int dead_s = static_cast<int>(std::max<uint64_t>(options.dead_peer_timeout_ms / 1000, 1));
  set_option(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(options.dead_peer_timeout_ms));
  set_option(socket, SOL_SOCKET, SO_KEEPALIVE, 1);
  set_option(socket, IPPROTO_TCP, TCP_KEEPIDLE, std::max(dead_s / 2, 1));
  set_option(socket, IPPROTO_TCP, TCP_KEEPINTVL, std::max(dead_s / 6, 1));
  set_option(socket, IPPROTO_TCP, TCP_KEEPCNT, 3);
  int buffer = static_cast<int>(options.socket_buffer_bytes);
  if (buffer != 0) {
    set_option(socket, SOL_SOCKET, SO_SNDBUF, buffer);
    set_option(socket, SOL_SOCKET, SO_RCVBUF, buffer);
  } else if (same_host) {
    set_option(socket, SOL_SOCKET, SO_SNDBUF, kSameHostSendBuffer);
  }
  if (same_host) {
    [[maybe_unused]] int ignored =
        setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, kSameHostCongestion, sizeof(kSameHostCongestion) - 1);
  }
}

bool Stream::adopt(Descriptor socket, uint32_t events, std::shared_ptr<void> owner,
                   const mooncake::tls::Context* tls, Transport::Side side) {
  token_ = worker_.poller().watch(socket.get(), events, this, std::move(owner));
  if (token_ == 0) return false;
  transport_.open(std::move(socket), tls, side);
  watched_events_ = events;
  return true;
}

bool Stream::move_to(Poller& host, std::shared_ptr<void> owner) {
  host_token_ = host.watch(socket(), EPOLLIN, this, std::move(owner));
  if (host_token_ == 0) return false;
  host_ = &host;
  watched_events_ = EPOLLIN;
  worker_.poller().change(token_, socket(), EPOLLRDHUP);
  return true;
}

void Stream::close_socket() {
  if (!is_open()) return;
  if (host_ != nullptr) {
    host_->forget(host_token_, socket());
  } else {
    worker_.set_deadline(token_, 0);  // on the worker's thread, as all that has no host
  }
  host_ = nullptr;
  worker_.poller().forget(token_, socket());
  transport_.close();
  out_.clear();
  sink_ = {};
  stalled_ = bulk_ = false;
  ahead_begin_ = ahead_end_ = 0;
  sent_seq_ = 0;
}

void Stream::fail(Status status) {
  close_socket();
  on_broken(status);
}

void Stream::on_events(uint32_t events) {
  if (events & EPOLLOUT) {
    flush();
    if (!is_open()) return;
  }
  bool ended = (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP)) != 0;
  if (stalled_ && may_read()) {
    stalled_ = false;
    receive();
  } else if (stalled_ && ended) {
    return fail({MC_UNREACHABLE, "the connection was reset"});
  } else if (ended || (events & EPOLLIN) != 0 || encrypted()) {
    receive();
  }
  if (is_open()) settle();
}

void Stream::settle() {
  on_settle();
  if (is_open()) flush();
  if (!is_open()) return;
  if (stalled_ && may_read()) worker_.again(token_);
  bool wants_room = encrypted() ? transport_.wants_room() : !out_.empty();
  uint32_t events = (may_read() && !stalled_ ? EPOLLIN : 0u) | (wants_room ? EPOLLOUT : 0u);
  if (events == watched_events_) return;
  watched_events_ = events;
  if (host_ != nullptr) {
    host_->change(host_token_, socket(), events);
  } else {
    worker_.poller().change(token_, socket(), events);
  }
}

// ---- out

void Stream::flush() {
  if (transport_.pending() && !transport_.push()) {
    if (errno != EAGAIN) fail({MC_UNREACHABLE, transport_.reason(errno)});
    return;
  }
  const uint64_t most = host_ != nullptr ? kHostTurnBytes : kTurnBytes;
  for (uint64_t turn = 0; is_open() && !out_.empty() && turn < most;) {
    iovec vectors[kMaxVectors];
    size_t count = 0;
    uint64_t offered = 0;
    for (size_t i = 0; i < out_.size(); ++i) {
      const Frame& frame = out_[i];
      if (count + 2 > kMaxVectors || offered >= kTurnBytes) break;
      if (frame.sent < sizeof(Header)) {
        auto* header = reinterpret_cast<const std::byte*>(&frame.header);
        vectors[count++] = {const_cast<std::byte*>(header) + frame.sent, sizeof(Header) - frame.sent};
        offered += sizeof(Header) - frame.sent;
      }
      uint64_t done = frame.sent > sizeof(Header) ? frame.sent - sizeof(Header) : 0;
      uint64_t left = frame.payload_length - done;
      if (left == 0) continue;
      uint64_t part = frame.filler ? std::min<uint64_t>(left, sizeof(kZeros)) : left;
      vectors[count++] = {const_cast<std::byte*>(frame.filler ? kZeros : frame.payload + done), part};
      offered += part;
      if (part < left) break;  // the rest of the filler comes before the next frame
    }
    ssize_t sent = transport_.send(vectors, count);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (sent < 0) return fail({MC_UNREACHABLE, transport_.reason(errno)});
    note_sent(static_cast<uint64_t>(sent));
    turn += static_cast<uint64_t>(sent);
    // When it took a part, the peer may have made room meanwhile: asking again is cheaper than being told.
    if (encrypted() && static_cast<uint64_t>(sent) < offered && transport_.pending()) return;
  }
}

void Stream::note_sent(uint64_t bytes) {
  while (bytes > 0) {
    Frame& frame = out_.front();
    uint64_t part = std::min(bytes, sizeof(Header) + frame.payload_length - frame.sent);
    frame.sent += part;
    bytes -= part;
    if (frame.sent == sizeof(Header) + frame.payload_length) {
      sent_seq_ = frame.header.seq;
      out_.pop_front();
    }
  }
}

// ---- in

void Stream::expect_payload(std::byte* to, uint64_t length) {
  assert(!sink_.active && length > 0);
  sink_ = {true, to, length};
}

void Stream::receive() {
  if (!parse()) return;
  const uint64_t most = host_ != nullptr ? kHostTurnBytes : kTurnBytes;
  for (uint64_t turn = 0; turn < most;) {
    iovec vectors[2];
    size_t count = 0;
    size_t asked = 0;
    bool whole = true;
    if (sink_.active) {
      size_t part = sink_.to ? sink_.remaining : std::min<uint64_t>(sink_.remaining, sizeof(nowhere));
      vectors[count++] = {sink_.to ? sink_.to : nowhere, part};
      asked += part;
      whole = part == sink_.remaining;
    }
    if (whole) {
      size_t room = (bulk_ ? sizeof(Header) : sizeof(ahead_)) - ahead_end_;
      vectors[count++] = {ahead_ + ahead_end_, room};
      asked += room;
    }
    ssize_t received = transport_.receive(vectors, count);
    if (received < 0 && errno == EINTR) continue;
    if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (received < 0) return fail({MC_UNREACHABLE, transport_.reason(errno)});
    if (received == 0) return fail({MC_UNREACHABLE, "the peer closed the connection"});
    consume(static_cast<size_t>(received));
    if (!parse() || static_cast<size_t>(received) < asked) return;
    turn += static_cast<uint64_t>(received);
  }
  // What TLS holds decrypted, the poller does not see.
  if (encrypted()) worker_.again(token_);
}

void Stream::consume(size_t received) {
  if (sink_.active) {
    size_t part = std::min<uint64_t>(received, sink_.remaining);
    if (sink_.to) sink_.to += part;
    sink_.remaining -= part;
    received -= part;
  }
  ahead_end_ += received;
}

// Handles what has arrived. False: the stream has been closed, or may not read on for now.
bool Stream::parse() {
  while (true) {
    if (sink_.active) {
      if (!take_payload_from_ahead()) return true;
      sink_.active = false;
      on_payload();
      if (!is_open()) return false;
      continue;
    }
    size_t size = ahead_end_ - ahead_begin_;
    if (size >= sizeof(kMagic) && memcmp(ahead_ + ahead_begin_, &kMagic, sizeof(kMagic)) != 0) {
      fail({MC_UNREACHABLE, "what answers there does not speak this protocol"});
      return false;
    }
    if (size < sizeof(Header)) {
      memmove(ahead_, ahead_ + ahead_begin_, size);
      ahead_begin_ = 0;
      ahead_end_ = size;
      return true;
    }
    if (!may_read()) {
      stalled_ = true;
      return false;
    }
    if (!take_header()) return false;
  }
}

// True when the payload is complete.
bool Stream::take_payload_from_ahead() {
  size_t part = std::min<uint64_t>(ahead_end_ - ahead_begin_, sink_.remaining);
  if (part > 0 && sink_.to) {
    memcpy(sink_.to, ahead_ + ahead_begin_, part);
    sink_.to += part;
  }
  ahead_begin_ += part;
  sink_.remaining -= part;
  if (ahead_begin_ == ahead_end_) ahead_begin_ = ahead_end_ = 0;
  return sink_.remaining == 0;
}

bool Stream::take_header() {
  Header header;
  memcpy(&header, ahead_ + ahead_begin_, sizeof(header));
  ahead_begin_ += sizeof(header);
  if (!header.well_formed() || !on_frame(header)) {
    if (is_open()) fail({MC_UNREACHABLE, "it sent a frame that makes no sense"});
    return false;
  }
  bulk_ = sink_.active && sink_.remaining >= kBulkBytes;
  return is_open();
}

}  // namespace mooncake_tcp
