// Posting and fetching, with the rules that a device has for them.
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "verbs_double.hpp"

namespace verbs_double {

std::atomic<uint64_t> doorbells{0}, requests{0}, signalled{0}, inlined{0};

namespace {

// With the mutex of the queue held.
void notify(Cq& cq) {
  if (!std::exchange(cq.armed, false) || cq.base.channel == nullptr) return;
  uint64_t one = 1;
  [[maybe_unused]] ssize_t ignored = write(cq.base.channel->fd, &one, sizeof one);
}

}  // namespace

void complete(Qp& qp, const ibv::SendWr& wr, uint64_t position, int status, uint32_t bytes) {
  // Success is reported when asked for, failure always.
  if (status == ibv::kSuccess && (wr.send_flags & ibv::kSignaled) == 0 && qp.init.sq_sig_all == 0) return;
  Cq& cq = *reinterpret_cast<Cq*>(qp.base.send_cq);
  std::lock_guard lock(cq.mutex);
  if (cq.count == cq.ring.size()) {
    if (!std::exchange(cq.overflown, true)) violated("the completion queue overflows");
    return;
  }
  Cq::Entry& entry = cq.ring[(cq.head + cq.count++) % cq.ring.size()];
  entry.wc = {};
  entry.wc.wr_id = wr.wr_id;
  entry.wc.status = status;
  entry.wc.opcode = wr.opcode == ibv::kRead ? ibv::kWcRdmaRead : ibv::kWcRdmaWrite;
  entry.wc.byte_len = bytes;
  entry.wc.qp_num = qp.base.qp_num;
  entry.qp = &qp;
  entry.position = position;
  notify(cq);
}

void collect(Cq& cq) {
  for (Qp* qp : cq.receivers) {
    QpEntry& entry = fabric().qps[qp->entry];
    if (std::atomic_ref<uint32_t>(entry.received_count).load() == 0) continue;
    std::lock_guard at_entry(entry.lock);
    std::lock_guard lock(cq.mutex);
    for (uint32_t i = 0; i < entry.received_count && cq.count < cq.ring.size(); ++i) {
      Cq::Entry& done = cq.ring[(cq.head + cq.count++) % cq.ring.size()];
      done = {};
      done.wc.wr_id = entry.received[i].id;
      done.wc.opcode = entry.received[i].placed ? ibv::kWcRecvRdmaWithImm : 128;
      done.wc.imm_data = entry.received[i].immediate;
      done.wc.byte_len = entry.received[i].length;
      done.wc.qp_num = qp->base.qp_num;
    }
    std::atomic_ref<uint32_t>(entry.received_count).store(0);
    notify(cq);
  }
}

int post_recv(ibv::Qp* base, ibv::RecvWr* wr, ibv::RecvWr** bad) {
  Qp& qp = *reinterpret_cast<Qp*>(base);
  QpEntry& entry = fabric().qps[qp.entry];
  std::lock_guard lock(entry.lock);
  for (; wr != nullptr; wr = wr->next) {
    uint32_t most = std::min(qp.init.cap.max_recv_wr, kReceives);
    MrEntry& mr = fabric().mrs[(wr->sg_list->lkey >> 8) % kMrs];
    bool known = mr.key == wr->sg_list->lkey && wr->sg_list->addr >= mr.iova;
    if (entry.receives_count + entry.received_count >= most || !known) {
      *bad = wr;
      violated("a receive buffer that there is no room for, or that is not registered");
      return ENOMEM;
    }
    uint64_t address = mr.address + (wr->sg_list->addr - mr.iova);
    entry.receives[entry.receives_count++] = {wr->wr_id, address, wr->sg_list->length, 0, 0, false};
  }
  return 0;
}

int poll_cq(ibv::Cq* base, int capacity, ibv::Wc* wc) {
  Cq& cq = *reinterpret_cast<Cq*>(base);
  if (cq.receives) {
    auto* context = reinterpret_cast<Context*>(base->context);
    std::lock_guard lock(context->mutex);
    collect(cq);
  }
  std::lock_guard lock(cq.mutex);
  int count = 0;
  for (; count < capacity && cq.count > 0; ++count) {
    Cq::Entry& entry = cq.ring[cq.head];
    wc[count] = entry.wc;
    // What was posted up to here gives its place back: not earlier, as with a device.
    if (entry.qp != nullptr) {
      std::atomic_ref<uint64_t> retired(entry.qp->retired);
      if (retired < entry.position) retired = entry.position;
    }
    cq.head = (cq.head + 1) % cq.ring.size();
    --cq.count;
  }
  return count;
}

int req_notify_cq(ibv::Cq* base, int) {
  Cq& cq = *reinterpret_cast<Cq*>(base);
  std::lock_guard lock(cq.mutex);
  cq.armed = true;
  return 0;
}

namespace {

int check(const Qp& qp, const ibv::SendWr& wr) {
  if (wr.num_sge != 1) return violated("one scatter element was asked for"), EINVAL;
  if (wr.opcode != ibv::kWrite && wr.opcode != ibv::kRead && wr.opcode != ibv::kSend &&
      wr.opcode != ibv::kWriteWithImm)
    return violated("an unknown opcode"), EINVAL;
  if ((wr.send_flags & ibv::kInline) != 0) {
    if (wr.opcode == ibv::kRead) return violated("a read cannot be inline"), EINVAL;
    if (wr.sg_list->length > qp.init.cap.max_inline_data)
      return violated("more inline bytes than the queue pair takes"), EINVAL;
  }
  uint64_t retired = std::atomic_ref<const uint64_t>(qp.retired);
  if (qp.posted - retired >= qp.init.cap.max_send_wr) return violated("the send queue overflows"), ENOMEM;
  return 0;
}

}  // namespace

int post_send(ibv::Qp* base, ibv::SendWr* wr, ibv::SendWr** bad) {
  Qp& qp = *reinterpret_cast<Qp*>(base);
  auto* context = reinterpret_cast<Context*>(base->context);
  bool null = context->device->null;
  doorbells.fetch_add(1, std::memory_order_relaxed);
  std::unique_lock lock(qp.mutex);
  for (; wr != nullptr; wr = wr->next) {
    int error = qp.state == ibv::kReadyToSend || qp.state == ibv::kError ? check(qp, *wr) : EINVAL;
    if (error != 0) {
      *bad = wr;
      return error;
    }
    ++qp.posted;
    requests.fetch_add(1, std::memory_order_relaxed);
    if ((wr->send_flags & ibv::kSignaled) != 0) signalled.fetch_add(1, std::memory_order_relaxed);
    if ((wr->send_flags & ibv::kInline) != 0) inlined.fetch_add(1, std::memory_order_relaxed);
    if (null) {
      complete(qp, *wr, qp.posted, ibv::kSuccess, wr->sg_list->length);
      continue;
    }
    Work& work = qp.queue.emplace_back(Work{*wr, *wr->sg_list, {}, qp.posted});
    if ((wr->send_flags & ibv::kInline) != 0) {  // the memory is the caller's again at once
      auto* from = reinterpret_cast<const char*>(work.sge.addr);
      work.inlined.assign(from, from + work.sge.length);
    }
  }
  if (null) return 0;
  if (qp.state == ibv::kError) flush(qp);
  lock.unlock();
  {
    std::lock_guard waking(context->mutex);
    context->work.fetch_add(1);
  }
  context->changed.notify_one();
  return 0;
}

}  // namespace verbs_double
