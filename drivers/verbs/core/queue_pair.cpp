#include "queue_pair.hpp"

#include <arpa/inet.h>

#include <bit>
#include <cerrno>

#include "registration.hpp"
#include "support/os.hpp"

namespace mooncake::verbs {
namespace {

constexpr uint32_t kPsnMask = 0xffffff;
constexpr uint8_t kHopLimit = 64;
constexpr uint8_t kMinRnrTimer = 12;  // 0.64 ms
constexpr uint8_t kRnrForever = 7;

}  // namespace

Status QueuePair::make(Device& device, const Options& options, Side side, ibv::Cq* received,
                       std::unique_ptr<QueuePair>& made) {
  std::unique_ptr<QueuePair> fresh(new QueuePair(device, options, side));
  bool initiator = side == Side::kInitiator;
  ibv::QpInitAttr attr{};
  attr.send_cq = device.cq();
  attr.recv_cq = initiator ? device.cq() : received;
  attr.qp_type = ibv::kReliableConnection;
  uint32_t depth = initiator ? std::bit_floor(options.send_depth) : 1;
  auto most = static_cast<uint32_t>(std::max(device.limits().max_qp_wr, 1));
  attr.cap = {std::min(depth, std::bit_floor(most)), initiator ? 1 : kNoticesPerQp, 1, 1,
              initiator ? options.inline_bytes : 0};
  fresh->depth_ = attr.cap.max_send_wr;
  fresh->qp_ = device.verbs().create_qp(device.pd(), &attr);
  if (fresh->qp_ == nullptr && attr.cap.max_inline_data > 0) {  // some devices refuse what they cannot inline
    attr.cap.max_inline_data = 0;
    fresh->qp_ = device.verbs().create_qp(device.pd(), &attr);
  }
  if (fresh->qp_ == nullptr)
    return system_failure(MC_IO, device.name() + ": cannot create a queue pair", errno);
  fresh->max_inline_ = std::min(attr.cap.max_inline_data, initiator ? options.inline_bytes : 0);
  if (initiator) {
    fresh->mask_ = fresh->depth_ - 1;
    fresh->ring_.resize(fresh->depth_);
    for (size_t i = 0; i < kChain; ++i) {
      fresh->wrs_[i].sg_list = &fresh->sges_[i];
      fresh->wrs_[i].num_sge = 1;
      fresh->wrs_[i].next = i + 1 < kChain ? &fresh->wrs_[i + 1] : nullptr;
    }
  }
  if (Status status = driver::fill_random(&fresh->psn_, sizeof fresh->psn_); !status.ok()) return status;
  fresh->psn_ &= kPsnMask;
  if (Status status = fresh->to_init(); !status.ok()) return status;
  made = std::move(fresh);
  return {};
}

Status QueuePair::post_receive(uint64_t id, ibv::Sge buffer) {
  ibv::RecvWr wr{id, nullptr, &buffer, 1};
  ibv::RecvWr* bad = nullptr;
  int error = qp_->context->ops.post_recv(qp_, &wr, &bad);
  if (error == 0) return {};
  return system_failure(MC_IO, device_.name() + ": cannot post a receive buffer", error);
}

Slice QueuePair::notice(uint32_t operation, uint32_t length, const Registration& from, uint64_t offset) {
  uint32_t slot = sent_++ % places_.slots;
  return {operation,
          kNotice,
          length,
          from.lkey(offset),
          places_.rkey,
          from.iova() + offset,
          from.address() + offset,
          places_.iova + slot * MC_NOTICE_MAX,
          htonl(slot)};
}

void QueuePair::end() {
  if (qp_ == nullptr) return;
  ibv::QpAttr attr{};
  attr.qp_state = ibv::kError;
  device_.verbs().modify_qp(qp_, &attr, ibv::kQpState);
  device_.verbs().destroy_qp(std::exchange(qp_, nullptr));
}

Status QueuePair::to_init() {
  ibv::QpAttr attr{};
  attr.qp_state = ibv::kInit;
  attr.pkey_index = static_cast<uint16_t>(options_.pkey_index);
  attr.port_num = static_cast<uint8_t>(device_.port());
  attr.qp_access_flags = side_ == Side::kTarget ? ibv::kRemoteRead | ibv::kRemoteWrite : 0u;
  int mask = ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags;
  if (int error = device_.verbs().modify_qp(qp_, &attr, mask); error != 0)
    return system_failure(MC_IO, device_.name() + ": cannot initialise a queue pair", error);
  return {};
}

Status QueuePair::connect(const PortAddress& own, const Greeting& peer, const QpAddress& theirs) {
  const Verbs& verbs = device_.verbs();
  ibv::QpAttr attr{};
  attr.qp_state = ibv::kReadyToReceive;
  attr.path_mtu = std::min<int>(own.mtu, peer.mtu);
  attr.dest_qp_num = theirs.number;
  attr.rq_psn = theirs.psn & kPsnMask;
  auto incoming = static_cast<uint32_t>(std::max(device_.limits().max_qp_rd_atom, 1));
  attr.max_dest_rd_atomic = static_cast<uint8_t>(std::min(incoming, options_.rd_atomic));
  attr.min_rnr_timer = kMinRnrTimer;
  attr.ah_attr.dlid = peer.lid;
  attr.ah_attr.sl = static_cast<uint8_t>(options_.service_level);
  attr.ah_attr.port_num = static_cast<uint8_t>(device_.port());
  constexpr ibv::Gid kNoGid{};
  if (own.ethernet || std::memcmp(&own.gid, &kNoGid, sizeof kNoGid) != 0) {
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = peer.gid;
    attr.ah_attr.grh.sgid_index = static_cast<uint8_t>(own.gid_index);
    attr.ah_attr.grh.hop_limit = kHopLimit;
    attr.ah_attr.grh.traffic_class = static_cast<uint8_t>(options_.traffic_class);
  }
  int mask = ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
             ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer;
  if (int error = verbs.modify_qp(qp_, &attr, mask); error != 0)
    return system_failure(MC_UNREACHABLE, device_.name() + " finds no way to " + text_of(peer.gid), error);
  if (side_ == Side::kTarget) return {};  // it never sends
  attr = {};
  attr.qp_state = ibv::kReadyToSend;
  attr.timeout = static_cast<uint8_t>(options_.timeout);
  attr.retry_cnt = static_cast<uint8_t>(options_.retries);
  attr.rnr_retry = kRnrForever;
  attr.sq_psn = psn_;
  auto outgoing = static_cast<uint32_t>(std::max(device_.limits().max_qp_init_rd_atom, 1));
  attr.max_rd_atomic =
      static_cast<uint8_t>(std::min({outgoing, options_.rd_atomic, uint32_t{peer.rd_atomic}}));
  mask = ibv::kQpState | ibv::kQpTimeout | ibv::kQpRetryCnt | ibv::kQpRnrRetry | ibv::kQpSqPsn |
         ibv::kQpMaxQpRdAtomic;
  if (int error = verbs.modify_qp(qp_, &attr, mask); error != 0)
    return system_failure(MC_IO, device_.name() + ": cannot start a queue pair", error);
  return {};
}

int QueuePair::post(Counters& counters) {
  size_t count = chained_;
  ibv::SendWr& last = wrs_[count - 1];
  last.send_flags |= ibv::kSignaled;
  ibv::SendWr* next = std::exchange(last.next, nullptr);
  ibv::SendWr* bad = nullptr;
  int error = qp_->context->ops.post_send(qp_, wrs_.data(), &bad);
  last.next = next;
  chained_ = 0;
  ++counters.doorbells;
  counters.inlined += std::exchange(inlined_, 0);
  if (error == 0) [[likely]] {
    counters.posted += count;
    counters.signalled += (count + kSignalEvery - 1) / kSignalEvery;
    return 0;
  }
  size_t taken = bad == nullptr ? 0 : static_cast<size_t>(bad - wrs_.data());
  counters.posted += taken;
  return error > 0 ? error : errno;
}

}  // namespace mooncake::verbs
