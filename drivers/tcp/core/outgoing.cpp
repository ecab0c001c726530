#include "outgoing.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>

#include "peer.hpp"

namespace mooncake_tcp {

namespace {
constexpr size_t kMaxInFlight =
    4096;  // requests of one connection, which bounds its memory when slices are tiny
constexpr size_t kMostFinished = 256;  // slices the peer hears of at a time
constexpr uint64_t kMs = 1'000'000;
}  // namespace

template <typename Body>
void Outgoing::enter(Body&& body) {
  {
    std::lock_guard lock(lock_);
    body();
  }
  settle_if_asked();
}

// Whoever asks either gets the lock or leaves the work to who has it, and looks after giving it back.
void Outgoing::settle_if_asked() {
  while (asked_.load()) {
    std::unique_lock lock(lock_, std::try_to_lock);
    if (!lock) return;
    if (asked_.exchange(false) && state_ == State::kReady) settle();
  }
}

namespace {

// Bytes leave by the interface that the endpoint listens on, which is what makes a rail of it.
Status bind_source(int socket, const SocketAddress& host, const SocketAddress& source) {
  bool usable = source.family() == host.family() && !source.is_wildcard() &&
                (!source.is_loopback() || host.is_loopback());
  if (!usable) return {};
  int on = 1;
  // The port is chosen when the peer is known, so that peers can share one.
  setsockopt(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof(on));
  SocketAddress from = source;
  from.set_port(0);
  if (bind(socket, from.raw(), from.length) == 0) return {};
  return {MC_UNREACHABLE, "cannot connect from " + from.host() + ": " + strerror(errno)};
}

}  // namespace

void Outgoing::kick() {
  if (kicked_.exchange(true)) return;
  worker_.post([this, keep = peer_.shared_from_this()] { enter([this] { run_kick(); }); });
}

void Outgoing::kick_here() {
  if (!is_hosted()) return kick();
  auto keep = peer_.shared_from_this();
  asked_ = true;
  settle_if_asked();
}

void Outgoing::sweep_soon() {
  if (sweep_asked_.exchange(true)) return;
  worker_.post([this, keep = peer_.shared_from_this()] { enter([this] { sweep(); }); });
}

void Outgoing::shut_soon() {
  worker_.post([this, keep = peer_.shared_from_this()] { enter([this] { shut(); }); });
}

void Outgoing::run_kick() {
  kicked_ = false;  // before pulling, so that work that arrives during it kicks again
  if (state_ == State::kIdle) {
    next_host_ = 0;
    failures_.clear();
    connect_deadline_ns_ = now_ns() + peer_.surroundings().options.connect_timeout_ms * kMs;
    connect_next_host();
  } else if (state_ == State::kReady) {
    settle();
  } else if (state_ == State::kShut) {
    peer_.lost(index_, {MC_CLOSED, "disconnected"}, false);
  }
}

// ---- setting up

void Outgoing::connect_next_host() {
  const auto& hosts = peer_.address().hosts;
  while (next_host_ < hosts.size()) {
    const SocketAddress& host = hosts[next_host_++];
    label_ = host.text();
    uint64_t now = now_ns();
    uint64_t left = connect_deadline_ns_ > now ? connect_deadline_ns_ - now : 0;
    Status status = connect_to(host);
    if (status.ok()) {
      // Every host that is left gets an equal part of the time.
      set_deadline(now + left / (hosts.size() - next_host_ + 1));
      return;
    }
    failures_ += (failures_.empty() ? "" : "; ") + label_ + ": " + status.reason;
  }
  state_ = State::kIdle;
  peer_.lost(index_, {MC_UNREACHABLE, "cannot connect to " + failures_}, false);
}

Status Outgoing::connect_to(const SocketAddress& host) {
  const Surroundings& surroundings = peer_.surroundings();
  Descriptor socket(::socket(host.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, IPPROTO_TCP));
  if (!socket.valid()) return {MC_UNREACHABLE, strerror(errno)};
  tune_socket(socket.get(), surroundings.options, is_same_host(host, surroundings.own_hosts));
  Status bound = bind_source(socket.get(), host, surroundings.source);
  if (!bound.ok()) return bound;
  SocketAddress target = host;
  Status scoped = target.take_scope(surroundings.source);
  if (!scoped.ok()) return scoped;
  if (::connect(socket.get(), target.raw(), target.length) != 0 && errno != EINPROGRESS) {
    return {MC_UNREACHABLE, strerror(errno)};
  }
  if (!adopt(std::move(socket), EPOLLOUT, peer_.shared_from_this(), surroundings.options.tls.get(),
             Transport::Side::kConnecting)) {
    return {MC_UNREACHABLE, strerror(errno)};
  }
  state_ = State::kConnecting;
  return {};
}

void Outgoing::on_events(uint32_t events) {
  enter([&] {
    if (!is_open()) return;  // another thread closed it meanwhile
    if (state_ == State::kConnecting) {
      on_connected();
    } else {
      Stream::on_events(events);
    }
  });
}

void Outgoing::on_connected() {
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(socket(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
  if (error != 0) return abandon_host(strerror(error));
  state_ = State::kGreeting;
  Frame hello;
  hello.header.op = static_cast<uint8_t>(Op::kHello);
  hello.header.key = peer_.address().nonce;
  hello.header.region_id = peer_.session();
  hello.header.flags = static_cast<uint16_t>(index_);
  hello.header.remote_offset = ++generation_;
  out_.push_back(std::move(hello));
  settle();
}

void Outgoing::on_deadline() {
  enter([this] {
    if (state_ != State::kConnecting && state_ != State::kGreeting) return;
    abandon_host(state_ == State::kConnecting ? "no answer in time"
                                              : "it accepts connections but does not answer");
  });
}

void Outgoing::abandon_host(const std::string& reason) {
  close_socket();
  failures_ += (failures_.empty() ? "" : "; ") + label_ + ": " + reason;
  connect_next_host();
}

bool Outgoing::on_welcome(const Header& header) {
  if (header.status != MC_OK) {
    fail({MC_UNREACHABLE, "another process listens there now; fetch the descriptor anew"});
    return true;
  }
  state_ = State::kReady;
  next_seq_ = 1;
  set_deadline(0);
  // Where that fails, the worker goes on with it; and TLS costs more than waking it.
  if (index_ == 0 && !encrypted()) hosted_ = move_to(peer_.surroundings().poller, peer_.shared_from_this());
  peer_.surroundings().counters.connections.fetch_add(1, std::memory_order_relaxed);
  peer_.welcomed(index_);
  return true;
}

// ---- work

void Outgoing::on_settle() {
  tell_finished();
  if (state_ == State::kReady) pull();
}

// Takes one share at a time, and none while the socket is full: what a busy connection does not take, another
// one does.
void Outgoing::pull() {
  uint64_t window =
      std::max(peer_.surroundings().options.window_bytes, peer_.surroundings().options.slice_bytes);
  if (!out_.empty() || load() >= window || in_flight_.size() >= kMaxInFlight) return;
  pulled_.clear();
  peer_.take(index_, window - load(), kMaxInFlight - in_flight_.size(), &pulled_);
  for (Slice& slice : pulled_) request(std::move(slice));
  pulled_.clear();
}

void Outgoing::request(Slice slice) {
  const Operation& operation = *slice.operation;
  bool write = operation.opcode == MC_WRITE;
  Frame frame;
  frame.header.op = static_cast<uint8_t>(write ? Op::kWrite : Op::kRead);
  frame.header.seq = next_seq_++;
  frame.header.region_id = operation.remote->id;
  frame.header.key = operation.remote->key;
  frame.header.remote_offset = slice.remote_offset;
  frame.header.length = slice.length;
  if (write) {
    frame.payload = slice.local;
    frame.payload_length = slice.length;
  }
  in_flight_bytes_.fetch_add(slice.length, std::memory_order_relaxed);
  in_flight_.push_back({frame.header.seq, std::move(slice), operation.opcode});
  out_.push_back(std::move(frame));
}

bool Outgoing::on_frame(const Header& header) {
  auto op = static_cast<Op>(header.op);
  if (state_ == State::kGreeting) return op == Op::kWelcome && on_welcome(header);
  return (op == Op::kWriteDone || op == Op::kReadData) && on_answer(header);
}

bool Outgoing::on_answer(const Header& header) {
  // An answer to something not wholly sent would let the memory go while we still read it.
  if (header.seq > sent_seq_) return false;
  bool write = static_cast<Op>(header.op) == Op::kWriteDone;
  if (write && header.status == MC_OK) return header.length == 0 && finish_writes(header.seq);
  if (in_flight_.empty() || in_flight_.front().seq != header.seq) return false;
  const Request& request = in_flight_.front();
  if (write != (request.opcode == MC_WRITE)) return false;
  if (header.status != MC_OK) {
    if (header.length != 0) return false;
    if (is_final(header.flags) && request.slice.operation) {
      request.slice.operation->remote->refusal = header.flags;
    }
    finish_front({MC_REFUSED, label_ + " refused: " + text_of(header.flags)});
  } else {
    if (header.length != request.slice.length) return false;
    expect_payload(request.slice.operation ? request.slice.local : nullptr, header.length);
  }
  return true;
}

// All writes up to this one are in the target's memory. False: that is not possible.
bool Outgoing::finish_writes(uint64_t seq) {
  if (in_flight_.empty() || in_flight_.front().seq > seq) return false;
  while (!in_flight_.empty() && in_flight_.front().seq <= seq) {
    if (in_flight_.front().opcode != MC_WRITE) return false;
    finish_front({});
  }
  return true;
}

void Outgoing::on_payload() { finish_front({}); }

void Outgoing::finish_front(const Status& status) {
  Request request = std::move(in_flight_.front());
  in_flight_.pop_front();
  in_flight_bytes_.fetch_sub(request.slice.length, std::memory_order_relaxed);
  if (!request.slice.operation) {
    if (request.opcode == MC_WRITE) peer_.dropped_write_answered(index_);
    return;
  }
  if (!status.ok()) return peer_.slice_failed(request.slice, status);
  finished_.push_back(std::move(request.slice));
  if (finished_.size() >= kMostFinished) tell_finished();
}

void Outgoing::tell_finished() {
  if (finished_.empty()) return;
  peer_.slices_done(finished_);
  finished_.clear();
}

// ---- ending

void Outgoing::sweep() {
  sweep_asked_ = false;
  tell_finished();
  for (size_t i = in_flight_.size(); i-- > 0;) {
    if (in_flight_[i].slice.operation && in_flight_[i].slice.operation->dropped) drop_slice(i);
  }
  if (is_open() && state_ == State::kReady) settle();
}

// Lets go of the memory of one slice. The connection stays in step: what the peer expects it still gets.
void Outgoing::drop_slice(size_t position) {
  Slice slice = std::move(in_flight_[position].slice);
  uint64_t seq = in_flight_[position].seq;
  bool late = in_flight_[position].opcode == MC_WRITE;  // bytes of it may reach the target's memory yet
  in_flight_[position].slice = {nullptr, nullptr, 0, slice.length};
  size_t frame = find_queued(seq);
  if (frame < out_.size() && out_[frame].sent == 0) {
    out_.erase(frame);
    in_flight_.erase(position);
    in_flight_bytes_.fetch_sub(slice.length, std::memory_order_relaxed);
    late = false;
  } else if (frame < out_.size()) {
    out_[frame].filler = true;
  } else if (position == 0 && receiving_payload()) {
    divert_payload();
  }
  if (late)
    peer_.write_dropped(index_,
                        generation_);  // before the completion is out, after which a new write may come
  peer_.slice_failed(slice, {MC_CANCELLED, "cancelled"});
}

// Requests queue in the order of their numbers. The size of the queue when it is not there.
size_t Outgoing::find_queued(uint64_t seq) const {
  size_t first = 0, last = out_.size();
  while (first < last) {
    size_t middle = first + (last - first) / 2;
    if (out_[middle].header.seq < seq) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  return first < out_.size() && out_[first].header.seq == seq ? first : out_.size();
}

void Outgoing::shut() {
  tell_finished();
  bool was_ready = state_ == State::kReady;
  state_ = State::kShut;
  hosted_ = false;
  close_socket();
  if (was_ready) peer_.surroundings().counters.connections.fetch_sub(1, std::memory_order_relaxed);
  fail_in_flight({MC_CLOSED, "disconnected"});
  peer_.lost(index_, {MC_CLOSED, "disconnected"}, was_ready);
}

void Outgoing::on_stop() {
  enter([this] { shut(); });
}

void Outgoing::on_broken(const Status& status) {
  tell_finished();
  if (state_ == State::kGreeting) {
    failures_ += (failures_.empty() ? "" : "; ") + label_ + ": " + status.reason;
    // Not from here: the caller is still inside the stream whose socket has just gone.
    state_ = State::kConnecting;
    worker_.post([this, keep = peer_.shared_from_this()] {
      enter([this] {
        if (state_ == State::kConnecting && !is_open()) connect_next_host();
      });
    });
    return;
  }
  state_ = State::kIdle;
  hosted_ = false;
  peer_.surroundings().counters.connections.fetch_sub(1, std::memory_order_relaxed);
  bool writes = false;
  for (size_t i = 0; i < in_flight_.size(); ++i) writes |= in_flight_[i].opcode == MC_WRITE;
  if (writes) peer_.writes_lost(index_, generation_);  // before their completions are out
  Status ended{status.code, label_ + ": " + status.reason};
  fail_in_flight(ended);
  peer_.lost(index_, ended, true);
}

void Outgoing::fail_in_flight(const Status& status) {
  Ring<Request> ended;
  ended.swap(in_flight_);
  in_flight_bytes_ = 0;
  for (size_t i = 0; i < ended.size(); ++i) {
    if (ended[i].slice.operation) peer_.slice_failed(ended[i].slice, status);
  }
}

}  // namespace mooncake_tcp
