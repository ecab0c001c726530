#include "incoming.hpp"

#include <sys/epoll.h>

namespace mooncake_tcp {

namespace {
// A peer that asks without taking the answers is not read any further.
constexpr size_t kMaxAnswers = 1024;
// Writes are acknowledged when there is nothing left to read, but so often at least: the initiator must not
// run out of window meanwhile.
constexpr uint64_t kAcknowledgeBytes = 256u << 10;
}  // namespace

void Incoming::begin(Descriptor socket) {
  SocketAddress peer;
  peer.length = sizeof(peer.storage);
  if (getpeername(socket.get(), peer.raw(), &peer.length) == 0) admission_.set_user(peer.text());
  if (!adopt(std::move(socket), EPOLLIN, shared_from_this(), options_.tls.get(),
             Transport::Side::kAccepting)) {
    return;
  }
  set_deadline(now_ns() + options_.connect_timeout_ms * 1'000'000);
}

void Incoming::on_deadline() {
  close_socket();
  ended();
}

bool Incoming::may_read() const { return out_.size() < kMaxAnswers; }

bool Incoming::on_frame(const Header& header) {
  auto op = static_cast<Op>(header.op);
  if (!greeted_) return op == Op::kHello && greet(header);
  if (header.length == 0 || header.seq == 0) return false;
  if (op == Op::kWrite) {
    begin_write(header);
  } else if (op == Op::kRead) {
    answer_read(header);
  } else {
    return false;
  }
  return true;
}

bool Incoming::greet(const Header& header) {
  if (said_hello_ || header.length != 0) return false;
  said_hello_ = true;
  if (!same_key(header.key, nonce_)) {
    // Meant for another endpoint, which was at this port before. The deadline ends the connection if the peer
    // does not; nothing it says counts any more.
    welcome(MC_UNREACHABLE);
    return true;
  }
  std::vector<std::shared_ptr<Incoming>> older;
  if (header.session() != 0) {
    if (!sessions_.enter(header, shared_from_this(), &older)) return false;
    hello_ = header;
  }
  predecessors_ = older.size();
  for (const auto& connection : older) {
    connection->end_soon([successor = shared_from_this()] {
      successor->worker_.post([successor] { successor->predecessor_closed(); });
    });
  }
  if (older.empty()) welcome(MC_OK);
  return true;
}

void Incoming::welcome(mc_status status) {
  if (status == MC_OK) {
    greeted_ = true;
    introduced();
    set_deadline(0);
  }
  Frame frame;
  frame.header.op = static_cast<uint8_t>(Op::kWelcome);
  frame.header.status = status;
  out_.push_back(std::move(frame));
}

// Each connection is closed by its own worker: only there it is certain that no bytes are being applied. What
// the socket still holds goes with it.
void Incoming::end_soon(std::function<void()> then) {
  worker_.post([this, keep = shared_from_this(), then = std::move(then)] {
    close_socket();
    ended();
    then();
  });
}

void Incoming::predecessor_closed() {
  if (--predecessors_ != 0 || !is_open()) return;
  welcome(MC_OK);
  settle();
}

void Incoming::introduced() {
  if (std::exchange(stranger_, false)) counters_.strangers.fetch_sub(1, std::memory_order_relaxed);
}

void Incoming::ended() {
  introduced();
  write_use_.release();
  if (hello_.session() != 0) sessions_.leave(hello_, this);
}

void Incoming::begin_write(const Header& header) {
  writing_ = header;
  write_refusal_ = admission_.admit(header, MC_ACCESS_WRITE, &write_use_);
  // A refused payload is read all the same: what follows it on the connection may be welcome.
  expect_payload(write_use_ ? write_use_->at(header.remote_offset) : nullptr, header.length);
}

void Incoming::on_payload() {
  write_use_.release();
  if (write_refusal_ != Refusal::kNone) return answer(Op::kWriteDone, writing_, write_refusal_);
  applied_seq_ = writing_.seq;
  applied_bytes_ += writing_.length;
  if (applied_bytes_ < kAcknowledgeBytes) return;
  acknowledge();
  flush();
}

void Incoming::acknowledge() {
  if (applied_seq_ == 0) return;
  Frame frame;
  frame.header.op = static_cast<uint8_t>(Op::kWriteDone);
  frame.header.seq = std::exchange(applied_seq_, 0);
  applied_bytes_ = 0;
  out_.push_back(std::move(frame));
}

void Incoming::answer_read(const Header& header) {
  RegionUse use;
  Refusal refusal = admission_.admit(header, MC_ACCESS_READ, &use);
  if (refusal != Refusal::kNone) return answer(Op::kReadData, header, refusal);
  acknowledge();  // answers keep the order of the requests
  Frame frame;
  frame.header.op = static_cast<uint8_t>(Op::kReadData);
  frame.header.seq = header.seq;
  frame.header.length = header.length;
  frame.payload = use->at(header.remote_offset);
  frame.payload_length = header.length;
  frame.use = std::move(use);
  out_.push_back(std::move(frame));
}

void Incoming::answer(Op op, const Header& request, Refusal refusal) {
  acknowledge();
  Frame frame;
  frame.header.op = static_cast<uint8_t>(op);
  frame.header.seq = request.seq;
  if (refusal != Refusal::kNone) {
    frame.header.status = MC_REFUSED;
    frame.header.flags = static_cast<uint16_t>(refusal);
    counters_.refused.fetch_add(1, std::memory_order_relaxed);
  }
  out_.push_back(std::move(frame));
}

void Incoming::on_revoked() {
  if (write_use_.revoked()) {
    divert_payload();
    write_use_.release();
    write_refusal_ = Refusal::kClosing;
  }
  for (size_t i = 0; i < out_.size(); ++i) {
    Frame& frame = out_[i];
    if (!frame.use.revoked() || frame.sent != 0) continue;
    frame.use.release();
    frame.payload = nullptr;
    frame.payload_length = frame.header.length = 0;
    frame.header.status = MC_REFUSED;
    frame.header.flags = static_cast<uint16_t>(Refusal::kClosing);
    counters_.refused.fetch_add(1, std::memory_order_relaxed);
  }
}

void Incoming::on_abort(const Region& region) {
  // An answer that has begun cannot be taken back within the protocol, and the peer does not take the rest of
  // it.
  for (size_t i = 0; i < out_.size(); ++i) {
    const Frame& frame = out_[i];
    if (frame.use.get() == &region && frame.use.revoked()) return fail({MC_CLOSED, "the region is closed"});
  }
}

void Incoming::on_stop() {
  close_socket();
  ended();
}

void Incoming::on_broken(const Status&) { ended(); }

}  // namespace mooncake_tcp
