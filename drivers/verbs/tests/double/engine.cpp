// What a device does with what was posted: checks keys, ranges and rights at both ends, and moves bytes
// between processes without asking the target's.
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "verbs_double.hpp"

namespace verbs_double {
namespace {

constexpr size_t kPiece = 256 << 10;  // moved with the locks held
constexpr auto kRetryTime = std::chrono::milliseconds(100);

bool inside(uint64_t at, uint64_t length, const MrEntry& mr) {
  return at >= mr.iova && length <= mr.length && at - mr.iova <= mr.length - length;
}

MrEntry* find_mr(uint32_t key) {
  MrEntry& mr = fabric().mrs[(key >> 8) % kMrs];
  return key != 0 && mr.key == key ? &mr : nullptr;
}

// 0, or how a device would report it. With the locks of both sides held.
int copy(MrEntry* local, uint64_t from, const std::vector<char>& inlined, MrEntry& remote, uint64_t to,
         size_t length, size_t done, bool read) {
  uint64_t there = remote.address + (to - remote.iova) + done;
  uint64_t here = inlined.empty() ? local->address + (from - local->iova) + done
                                  : reinterpret_cast<uint64_t>(inlined.data()) + done;
  iovec ours{reinterpret_cast<void*>(here), length};
  iovec theirs{reinterpret_cast<void*>(there), length};
  // By number: what a device does to memory is not for a sanitizer of this process to see.
  long number = read ? SYS_process_vm_readv : SYS_process_vm_writev;
  long moved = syscall(number, remote.pid.load(), &ours, 1, &theirs, 1, 0);
  if (moved == static_cast<long>(length)) return ibv::kSuccess;
  return moved < 0 && errno == ESRCH ? ibv::kRetryExcErr : ibv::kRemOpErr;
}

// The queue pair at the other end, if packets would reach it and it would take them.
QpEntry* find_peer(Qp& qp) {
  const QpEntry& own = fabric().qps[qp.entry];
  QpEntry& peer = fabric().qps[own.dest & (kQps - 1)];
  if (peer.number != own.dest || peer.device != own.dest_device) return nullptr;
  int state = peer.state;
  if (state != ibv::kReadyToReceive && state != ibv::kReadyToSend) return nullptr;
  if (peer.dest != own.number) return nullptr;
  if (!std::exchange(qp.proven, true)) {
    if (peer.rq_psn != own.sq_psn) violated("the target expects another packet number");
    if (peer.mtu != own.mtu) violated("the two sides have other MTUs");
    if (qp.max_rd_atomic > peer.max_dest_rd_atomic) violated("more reads at once than the target answers");
  }
  return &peer;
}

// The first of what waits has come. With the lock of the queue pair held.
void receive(QpEntry& qp, const QpEntry::Receive& done) {
  std::copy(qp.receives + 1, qp.receives + qp.receives_count, qp.receives);
  --qp.receives_count;
  qp.received[qp.received_count] = done;
  std::atomic_ref<uint32_t>(qp.received_count).fetch_add(1);  // looked at without the lock
}

constexpr int kNotReady = -1;  // the target has no buffer for a message yet

// A message into the first buffer of the peer.
int send_message(Qp& qp, const Work& work) {
  const QpEntry& own = fabric().qps[qp.entry];
  if (fabric().down[own.device] != 0 || fabric().down[own.dest_device] != 0) return ibv::kRetryExcErr;
  QpEntry* peer = find_peer(qp);
  if (peer == nullptr) return ibv::kRetryExcErr;
  std::lock_guard at_peer(peer->lock);
  if (find_peer(qp) != peer) return ibv::kRetryExcErr;
  if (peer->receives_count == 0) return kNotReady;
  QpEntry::Receive buffer = peer->receives[0];
  if (buffer.room < work.sge.length) return ibv::kRemInvReqErr;
  uint64_t here = reinterpret_cast<uint64_t>(work.inlined.data());
  if (work.inlined.empty()) {
    MrEntry* local = find_mr(work.sge.lkey);
    if (local == nullptr || local->pd != own.pd || !inside(work.sge.addr, work.sge.length, *local))
      return ibv::kLocProtErr;
    here = local->address + (work.sge.addr - local->iova);
  }
  iovec ours{reinterpret_cast<void*>(here), work.sge.length};
  iovec theirs{reinterpret_cast<void*>(buffer.address), work.sge.length};
  long moved = syscall(SYS_process_vm_writev, peer->pid.load(), &ours, 1, &theirs, 1, 0);
  if (moved != static_cast<long>(work.sge.length)) return ibv::kRetryExcErr;
  buffer.length = work.sge.length;
  receive(*peer, buffer);
  return ibv::kSuccess;
}

// What a write with immediate has moved takes a receive of the peer, whose buffer it does not touch. By then
// the bytes are there: a sender that does not know of a free place has spoilt another's.
int announce(Qp& qp, const Work& work) {
  QpEntry* peer = find_peer(qp);
  if (peer == nullptr) return ibv::kRetryExcErr;
  std::lock_guard at_peer(peer->lock);
  if (find_peer(qp) != peer) return ibv::kRetryExcErr;
  if (peer->receives_count == 0) return violated("a write with immediate finds no receive"), kNotReady;
  QpEntry::Receive taken = peer->receives[0];
  taken.length = work.sge.length;
  taken.immediate = work.wr.imm_data;
  taken.placed = true;
  receive(*peer, taken);
  return ibv::kSuccess;
}

int move_piece(Qp& qp, const Work& work, size_t done, size_t length) {
  const QpEntry& own = fabric().qps[qp.entry];
  bool read = work.wr.opcode == ibv::kRead;
  if (fabric().down[own.device] != 0 || fabric().down[own.dest_device] != 0) return ibv::kRetryExcErr;
  QpEntry* peer = find_peer(qp);
  if (peer == nullptr) return ibv::kRetryExcErr;
  std::lock_guard at_peer(peer->lock);
  if (find_peer(qp) != peer) return ibv::kRetryExcErr;
  MrEntry* remote = find_mr(work.wr.wr.rdma.rkey);
  if (remote == nullptr) return ibv::kRemAccessErr;
  std::unique_lock at_remote(remote->lock);
  uint64_t to = work.wr.wr.rdma.remote_addr;
  unsigned right = read ? ibv::kRemoteRead : ibv::kRemoteWrite;
  if (remote->key != work.wr.wr.rdma.rkey || remote->pd != peer->pd || (remote->access & right) == 0 ||
      (peer->access & right) == 0 || !inside(to, work.sge.length, *remote)) {
    return ibv::kRemAccessErr;
  }
  if (!work.inlined.empty()) return copy(nullptr, 0, work.inlined, *remote, to, length, done, false);
  MrEntry* local = find_mr(work.sge.lkey);
  // The driver's two sides never share a registration, so these two are in no other order elsewhere.
  if (local == nullptr || local == remote || local->pd != own.pd ||
      !inside(work.sge.addr, work.sge.length, *local) || (read && (local->access & ibv::kLocalWrite) == 0)) {
    return ibv::kLocProtErr;
  }
  std::lock_guard at_local(local->lock);
  if (local->key != work.sge.lkey) return ibv::kLocProtErr;
  return copy(local, work.sge.addr, {}, *remote, to, length, done, read);
}

void to_error(Qp& qp) {
  qp.state = ibv::kError;
  fabric().qps[qp.entry].state = ibv::kError;
}

// Carries out the first piece of work. Without the queue pair's mutex: it takes time.
void carry_out(Qp& qp, const Work& work) {
  bool message = work.wr.opcode == ibv::kSend;
  int status = message ? send_message(qp, work) : ibv::kSuccess;
  for (size_t done = message ? work.sge.length : 0; done < work.sge.length && status == ibv::kSuccess;) {
    size_t length = std::min<size_t>(kPiece, work.sge.length - done);
    status = move_piece(qp, work, done, length);
    done += length;
  }
  if (status == ibv::kSuccess && work.wr.opcode == ibv::kWriteWithImm) status = announce(qp, work);
  if (status == kNotReady) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::lock_guard lock(qp.mutex);
    qp.busy = false;
    if (qp.state != ibv::kReadyToSend) flush(qp);
    return;
  }
  const QpEntry& own = fabric().qps[qp.entry];
  if (status == ibv::kSuccess) fabric().carried[own.device] += work.sge.length;
  if (status == ibv::kRetryExcErr) std::this_thread::sleep_for(kRetryTime);
  if (status == ibv::kRemAccessErr) {
    if (QpEntry* peer = find_peer(qp)) peer->state = ibv::kError;  // as a target that was asked so does
  }
  std::lock_guard lock(qp.mutex);
  qp.busy = false;
  if (qp.state != ibv::kReadyToSend) return flush(qp);
  uint32_t bytes = work.sge.length;
  ibv::SendWr wr = work.wr;
  uint64_t position = work.position;
  if (status != ibv::kSuccess) to_error(qp);
  complete(qp, wr, position, status, bytes);
  qp.queue.pop_front();
  if (status != ibv::kSuccess) flush(qp);
}

// The next queue pair after `turn` that has work, marked as busy.
Qp* choose(Context& context, size_t* turn) {
  for (size_t i = 0; i < context.qps.size(); ++i) {
    Qp* qp = context.qps[(*turn + i) % context.qps.size()];
    std::lock_guard lock(qp->mutex);
    if (qp->queue.empty() || qp->state != ibv::kReadyToSend) continue;
    *turn = (*turn + i + 1) % context.qps.size();
    qp->busy = true;
    return qp;
  }
  return nullptr;
}

}  // namespace

void flush(Qp& qp) {
  if (qp.busy) return;  // the engine does it when it is done with what it has in hand
  for (const Work& work : qp.queue) complete(qp, work.wr, work.position, ibv::kWrFlushErr, 0);
  qp.queue.clear();
}

void run_engine(Context* context) {
  size_t turn = 0;
  std::unique_lock lock(context->mutex);
  while (!context->stopping) {
    uint32_t seen = context->work;
    for (Cq* cq : context->cqs) collect(*cq);  // no device tells this one that a message came
    Qp* qp = fabric().frozen[context->device->number] != 0 ? nullptr : choose(*context, &turn);
    if (qp == nullptr) {
      // Tests thaw a device by writing to the file, which wakes nobody.
      context->changed.wait_for(lock, std::chrono::milliseconds(5),
                                [&] { return context->stopping || context->work != seen; });
      continue;
    }
    Work* work = &qp->queue.front();  // stays where it is: only the engine takes out while it is busy
    lock.unlock();
    carry_out(*qp, *work);
    lock.lock();
    context->idle.notify_all();
  }
}

}  // namespace verbs_double
