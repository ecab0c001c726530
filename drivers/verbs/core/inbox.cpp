#include "inbox.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

namespace mooncake::verbs {
namespace {

constexpr size_t kMostWaiting = 1024;  // fetched from the device and not by the engine
constexpr size_t kDepth = 8192;

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
  most_boxes_ = depth / kNoticesPerPeer;
  return {};
}

Inbox::~Inbox() {
  if (cq_ != nullptr) device_->verbs().destroy_cq(cq_);
  if (channel_ != nullptr) device_->verbs().destroy_comp_channel(channel_);
}

Status Inbox::Box::post(size_t slot) {
  ibv::Sge sge{registration_->iova() + slot * MC_NOTICE_MAX, MC_NOTICE_MAX, registration_->lkey(0)};
  return qp_->post_receive(id_ << 8 | slot, sge);
}

Status Inbox::add(QueuePair& qp, std::unique_ptr<Box>& box) {
  std::lock_guard lock(mutex_);
  if (boxes_.size() >= most_boxes_)
    return failed(MC_UNREACHABLE, "it has as many peers as it has room for: " + std::to_string(most_boxes_));
  auto made = std::make_unique<Box>(next_id_++);
  made->qp_ = &qp;
  MemoryRange range{reinterpret_cast<uint64_t>(made->buffers_.data()), sizeof made->buffers_};
  Status status = Registration::make(*device_, options_, range, ibv::kLocalWrite, made->registration_);
  for (size_t slot = 0; slot < kNoticesPerPeer && status.ok(); ++slot) status = made->post(slot);
  if (!status.ok()) return status;
  boxes_[made->id_] = made.get();
  box = std::move(made);
  return {};
}

void Inbox::remove(std::unique_ptr<Box> box) {
  if (!box) return;
  std::lock_guard lock(mutex_);
  box->qp_ = nullptr;
  fetch(true);  // whoever sent them was told that they have come
  boxes_.erase(box->id_);
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
      auto found = boxes_.find(wc.wr_id >> 8);
      if (found == boxes_.end() || wc.status != ibv::kSuccess) continue;
      Box& box = *found->second;
      size_t slot = wc.wr_id & 0xff;
      mc_notice& notice = notices_.emplace_back();
      notice.length = std::min<uint32_t>(wc.byte_len, MC_NOTICE_MAX);
      std::copy_n(box.buffers_[slot].begin(), notice.length, notice.data);
      // Fails when its queue pair is about to end, and then nothing more comes.
      if (box.qp_ != nullptr) (void)box.post(slot);
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
