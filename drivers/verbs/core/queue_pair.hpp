// One reliable connection of the device, and the ring of what was posted to it.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "device.hpp"
#include "wire.hpp"

namespace mooncake::verbs {

constexpr uint32_t kNone = ~0u;
constexpr size_t kChain = 32;          // work requests with one doorbell, at most
constexpr uint32_t kNotice = 2;        // as an opcode, beside those of mc_opcode
constexpr uint32_t kNoticesPerQp = 8;  // that may come through one without any being fetched
constexpr size_t kSignalEvery = 16;    // of them one reports its completion, and so does the last

// One work request, ready to be posted.
struct Slice {
  uint32_t operation;
  uint32_t opcode;  // mc_opcode, or kNotice
  uint32_t length;
  uint32_t lkey, rkey;
  uint64_t local_iova;
  uint64_t local_address;  // 0: the processor must not touch it
  uint64_t remote_iova;
  uint32_t immediate = 0;  // of a notice
};

// Where the notices of one queue pair go at the peer: `slots` places of MC_NOTICE_MAX bytes each, used in
// turn.
struct Ring {
  uint64_t iova = 0;
  uint32_t rkey = 0;
  uint32_t slots = 0;  // 0: the peer has none
};

struct Counters {
  uint64_t doorbells = 0;
  uint64_t posted = 0;
  uint64_t signalled = 0;
  uint64_t inlined = 0;
};

struct Connection;
class Registration;

class QueuePair {
 public:
  enum class Side { kInitiator, kTarget };
  struct Posted {
    uint32_t operation;
    uint32_t bytes;
  };

  // `received`: the completion queue of what peers send; a target's only.
  static Status make(Device& device, const Options& options, Side side, ibv::Cq* received,
                     std::unique_ptr<QueuePair>& made);
  ~QueuePair() { end(); }
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  QpAddress address() const { return {qp_->qp_num, psn_}; }
  Status connect(const PortAddress& own, const Greeting& peer, const QpAddress& theirs);
  // Has a buffer wait for a message of the peer.
  Status post_receive(uint64_t id, ibv::Sge buffer);
  // When it returns, the device has let go of everything posted. The ring stays as it is.
  void end();

  // ---- the ring. Not thread-safe.
  // Completions carry it in their upper half, so that those of a past queue pair are told apart.
  void tag(uint32_t tag, Connection* connection) {
    tag_ = tag;
    connection_ = connection;
  }
  uint32_t tag() const { return tag_; }
  Connection* connection() const { return connection_; }
  uint32_t outstanding() const { return tail_ - head_; }  // posted or in the chain
  uint32_t room() const { return depth_ - outstanding(); }
  size_t chained() const { return chained_; }

  // Adds a work request to the chain; there must be room() for it.
  void append(const Slice& slice) {
    ibv::SendWr& wr = wrs_[chained_];
    ibv::Sge& sge = sges_[chained_];
    bool inlined = slice.opcode != MC_READ && slice.length <= max_inline_ && slice.local_address != 0;
    sge.addr = inlined ? slice.local_address : slice.local_iova;
    sge.length = slice.length;
    sge.lkey = slice.lkey;
    wr.opcode = slice.opcode == MC_WRITE  ? ibv::kWrite
                : slice.opcode == MC_READ ? ibv::kRead
                                          : ibv::kWriteWithImm;
    wr.imm_data = slice.immediate;
    bool signalled = chained_ % kSignalEvery == kSignalEvery - 1;
    wr.send_flags = (inlined ? ibv::kInline : 0u) | (signalled ? ibv::kSignaled : 0u);
    wr.wr_id = uint64_t{tag_} << 32 | tail_;
    wr.wr.rdma.remote_addr = slice.remote_iova;
    wr.wr.rdma.rkey = slice.rkey;
    ring_[tail_ & mask_] = {slice.operation, slice.length};
    ++tail_;
    ++chained_;
    inlined_ += inlined;
  }
  // Posts the chain with one doorbell. 0 or an errno: then the queue pair must not be used any more.
  int post(Counters& counters);

  // Takes what was posted up to a position (inclusive, unless `before` is set) off the ring, oldest first.
  template <class Each>
  uint32_t retire(uint32_t position, bool before, Each&& each) {
    uint32_t count = position - head_ + (before ? 0 : 1);
    if (count > outstanding()) return 0;  // a device that reports what was never posted
    for (uint32_t i = 0; i < count; ++i) each(ring_[(head_ + i) & mask_]);
    head_ += count;
    return count;
  }
  bool holds(uint32_t position) const { return position - head_ < outstanding(); }
  const Posted& at(uint32_t position) const { return ring_[position & mask_]; }
  // Positions go round; what lies before one is done when everything up to it was taken off.
  uint32_t tail() const { return tail_; }
  bool done_before(uint32_t position) const { return static_cast<int32_t>(position - head_) <= 0; }
  template <class Each>
  uint32_t retire_all(Each&& each) {
    return outstanding() == 0 ? 0 : retire(tail_ - 1, false, each);
  }

  // ---- the peer's places for notices: one is used again when the peer has said that it took what was there
  void use_ring(const Ring& ring) { places_ = ring; }
  bool has_ring() const { return places_.slots > 0; }
  bool has_place() const { return sent_ - taken_ < places_.slots; }
  // A work request that fills the next place; there must be one.
  Slice notice(uint32_t operation, uint32_t length, const Registration& from, uint64_t offset);
  void peer_took(uint32_t count) { taken_ += std::min(count, sent_ - taken_); }

 private:
  QueuePair(Device& device, const Options& options, Side side)
      : device_(device), options_(options), side_(side) {}
  Status to_init();

  Device& device_;
  const Options& options_;
  const Side side_;
  ibv::Qp* qp_ = nullptr;
  uint32_t psn_ = 0;
  uint32_t depth_ = 0, mask_ = 0, max_inline_ = 0;
  uint32_t tag_ = 0;
  Connection* connection_ = nullptr;
  uint32_t head_ = 0, tail_ = 0;
  size_t chained_ = 0;
  uint64_t inlined_ = 0;
  Ring places_;
  uint32_t sent_ = 0, taken_ = 0;  // notices
  std::array<ibv::SendWr, kChain> wrs_{};
  std::array<ibv::Sge, kChain> sges_{};
  std::vector<Posted> ring_;
};

}  // namespace mooncake::verbs
