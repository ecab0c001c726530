#include "inbox.hpp"

#include <arpa/inet.h>
#include <fcntl.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

namespace mooncake::verbs {
namespace {

constexpr size_t kMostWaiting = 1024;  // fetched from the device and not by the engine
constexpr size_t kDepth = 16384;

}  // namespace

Status Inbox::open() {
  const Verbs& verbs = device_->verbs();
  channel_ = verbs.create_comp_channel(device_->context());
  if (channel_ == nullptr || fcntl(channel_->fd, F_SETFL, fcntl(channel_->fd, F_GETFL) | O_NONBLOCK) != 0)
    return system_failure(MC_IO, device_->name() + ": cannot create a completion channel", errno);
  size_t depth = std::min<size_t>(kDepth, static_cast<size_t>(std::max(device_->limits().max_cqe, 1)));
  cq_ = verbs.create_cq(device_->context(), static_cast<int>(depth), nullptr, channel_, 0);
  if (cq_ == nullptr)
    return system_failure(MC_IO, device_->name() + ": cannot create a completion queue", errno);
  room_ = depth;
  return {};
}

Inbox::~Inbox() {
  if (cq_ != nullptr) device_->verbs().destroy_cq(cq_);
  if (channel_ != nullptr) device_->verbs().destroy_comp_channel(channel_);
}

// The buffer of a receive is not touched by a write with immediate; an older peer sends into it.
Status Inbox::Box::post(size_t qp, size_t slot) {
  uint64_t at = (qp * kNoticesPerQp + slot) * MC_NOTICE_MAX;
  ibv::Sge sge{registration_->iova() + at, MC_NOTICE_MAX, registration_->lkey(at)};
  return qps_[qp]->post_receive(id_ << 16 | qp << 8 | slot, sge);
}

void Inbox::Box::take(const ibv::Wc& wc, mc_notice& notice) const {
  bool placed = wc.opcode == ibv::kWcRecvRdmaWithImm;
  size_t slot = placed ? ntohl(wc.imm_data) % kNoticesPerQp : wc.wr_id & 0xff;
  size_t qp = wc.wr_id >> 8 & 0xff;
  notice.length = std::min<uint32_t>(wc.byte_len, MC_NOTICE_MAX);
  std::copy_n(&bytes_[(qp * kNoticesPerQp + slot) * MC_NOTICE_MAX], notice.length, notice.data);
}

Status Inbox::add(uint64_t session, uint64_t generation, const std::vector<std::unique_ptr<QueuePair>>& qps,
                  std::unique_ptr<Box>& box) {
  std::lock_guard lock(mutex_);
  size_t places = qps.size() * kNoticesPerQp;
  if (places > room_) return {};
  auto made = std::make_unique<Box>();
  made->id_ = next_id_++;
  made->session_ = session;
  made->generation_ = generation;
  made->bytes_.resize(places * MC_NOTICE_MAX);
  made->taken_.resize(qps.size());
  for (const auto& qp : qps) made->qps_.push_back(qp.get());
  MemoryRange range{reinterpret_cast<uint64_t>(made->bytes_.data()), made->bytes_.size()};
  constexpr unsigned kRights = ibv::kLocalWrite | ibv::kRemoteWrite;
  Status status = Registration::make(*device_, options_, range, kRights, made->registration_);
  for (size_t i = 0; i < places && status.ok(); ++i)
    status = made->post(i / kNoticesPerQp, i % kNoticesPerQp);
  if (!status.ok()) return status;
  room_ -= places;
  boxes_[made->id_] = made.get();
  box = std::move(made);
  return {};
}

void Inbox::remove(std::unique_ptr<Box> box) {
  if (!box) return;
  std::lock_guard lock(mutex_);
  room_ += box->qps_.size() * kNoticesPerQp;
  box->qps_.clear();
  fetch(true);  // whoever sent them was told that they have come
  boxes_.erase(box->id_);
}

// What was there has been copied.
void Inbox::free_place(Box& box, const ibv::Wc& wc) {
  if (box.qps_.empty()) return;
  size_t qp = wc.wr_id >> 8 & 0xff;
  // Fails when the queue pair is about to end, and then nothing more comes.
  (void)box.post(qp, wc.wr_id & 0xff);
  if (wc.opcode != ibv::kWcRecvRdmaWithImm || ++box.taken_[qp] < kNoticesPerQp / 2) return;
  uint32_t count = std::exchange(box.taken_[qp], 0);
  owed_.push_back({box.session_, {box.generation_, static_cast<uint8_t>(qp), count}});
  poller_.wake();
}

std::vector<Inbox::Owed> Inbox::owed() {
  std::lock_guard lock(mutex_);
  return std::exchange(owed_, {});
}

void Inbox::fetch(bool all) {
  std::array<ibv::Wc, 16> done;
  for (;;) {
    size_t room =
        all ? done.size() : std::min(done.size(), kMostWaiting - std::min(kMostWaiting, notices_.size()));
    if (room == 0) return;
    int count = cq_->context->ops.poll_cq(cq_, static_cast<int>(room), done.data());
    for (int i = 0; i < count; ++i) {
      const ibv::Wc& wc = done[static_cast<size_t>(i)];
      auto found = boxes_.find(wc.wr_id >> 16);
      if (found == boxes_.end() || wc.status != ibv::kSuccess) continue;
      found->second->take(wc, notices_.emplace_back());
      free_place(*found->second, wc);
    }
    if (count < static_cast<int>(room)) return;
  }
}

size_t Inbox::poll(mc_notice* notices, size_t capacity) {
  std::lock_guard lock(mutex_);
  fetch(false);
  size_t count = std::min(capacity, notices_.size());
  std::copy_n(notices_.begin(), count, notices);
  notices_.erase(notices_.begin(), notices_.begin() + static_cast<ptrdiff_t>(count));
  return count;
}

bool Inbox::arm() {
  std::lock_guard lock(mutex_);
  if (!notices_.empty()) return false;
  if (notified_ && device_->take_events(channel_)) notified_ = false;
  if (!std::exchange(notified_, true)) cq_->context->ops.req_notify_cq(cq_, 0);
  fetch(false);
  return notices_.empty();
}

}  // namespace mooncake::verbs
