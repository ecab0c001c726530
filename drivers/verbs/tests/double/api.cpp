// The functions that libibverbs exports, for devices double0, double1, ... and null0.
//
// The network is a file beside this library: processes that load the same file are on the same network.
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "verbs_double.hpp"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT mooncake::verbs::ibv::Device** ibv_get_device_list(int* count);

namespace verbs_double {
namespace {

constexpr int kMostWr = 4096, kMostCqe = 1 << 16;
constexpr uint32_t kMostInline = 256;

Fabric* map_fabric() {
  Dl_info own{};
  dladdr(reinterpret_cast<void*>(&ibv_get_device_list), &own);
  std::string path = std::string(own.dli_fname == nullptr ? "" : own.dli_fname) + ".fabric";
  int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, sizeof(Fabric)) != 0) {
    std::fprintf(stderr, "the verbs double cannot make %s\n", path.c_str());
    abort();
  }
  void* at = mmap(nullptr, sizeof(Fabric), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (at == MAP_FAILED) abort();
  auto* made = static_cast<Fabric*>(at);
  flock lock{};
  lock.l_type = F_WRLCK;
  fcntl(fd, F_SETLKW, &lock);
  if (made->ready == 0) {
    made->table.init();
    for (QpEntry& qp : made->qps) qp.lock.init();
    for (MrEntry& mr : made->mrs) mr.lock.init();
    made->ready = 1;
  }
  close(fd);                                  // and with it the lock
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);  // so that siblings may reach the memory of this process
  return made;
}

bool dead(int pid) { return pid != getpid() && kill(pid, 0) != 0 && errno == ESRCH; }

template <class Made>
Made* fail(int error) {
  errno = error;
  return nullptr;
}

std::vector<Device>& devices() {
  static auto* all = [] {
    auto* made = new std::vector<Device>;
    for (uint32_t i = 0; i + 1 < kDevices; ++i) made->push_back({"double" + std::to_string(i), i, false});
    made->push_back({"null0", kDevices - 1, true});
    return made;
  }();
  return *all;
}

ibv::Gid gid_of(uint32_t device, int index) {
  ibv::Gid gid{};
  if (index == 0) {  // link-local, RoCEv1
    gid.raw[0] = 0xfe, gid.raw[1] = 0x80, gid.raw[15] = static_cast<uint8_t>(device + 1);
  } else {  // 10.0.0.x, RoCEv2
    gid.raw[10] = gid.raw[11] = 0xff, gid.raw[12] = 10, gid.raw[15] = static_cast<uint8_t>(device + 1);
  }
  return gid;
}

Device& of(ibv::Device* device) { return *reinterpret_cast<Device*>(device); }
Context& of(ibv::Context* context) { return *reinterpret_cast<Context*>(context); }

}  // namespace

Fabric& fabric() {
  static Fabric* mapped = map_fabric();
  return *mapped;
}

void violated(const char* what) {
  ++fabric().violations;
  std::fprintf(stderr, "the verbs double (process %d): %s\n", getpid(), what);
}

EXPORT ibv::Device** ibv_get_device_list(int* count) {
  size_t all = devices().size();
  auto** list = static_cast<ibv::Device**>(calloc(all + 1, sizeof(ibv::Device*)));
  for (size_t i = 0; i < all; ++i) list[i] = reinterpret_cast<ibv::Device*>(&devices()[i]);
  if (count != nullptr) *count = static_cast<int>(all);
  return list;
}
EXPORT void ibv_free_device_list(ibv::Device** list) { free(list); }
EXPORT const char* ibv_get_device_name(ibv::Device* device) { return of(device).name.c_str(); }
EXPORT int ibv_fork_init() { return 0; }

EXPORT ibv::Context* ibv_open_device(ibv::Device* device) {
  fabric();
  auto* made = new Context{};
  made->device = &of(device);
  made->base.device = device;
  made->base.ops.poll_cq = poll_cq;
  made->base.ops.req_notify_cq = req_notify_cq;
  made->base.ops.post_send = post_send;
  made->base.ops.post_recv = post_recv;
  made->base.async_fd = eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE);
  made->base.cmd_fd = -1;
  if (!made->device->null) made->engine = std::thread(run_engine, made);
  return &made->base;
}

EXPORT int ibv_close_device(ibv::Context* base) {
  Context& context = of(base);
  if (context.users != 0) return violated("a device is closed before what was made of it"), EBUSY;
  {
    std::lock_guard lock(context.mutex);
    context.stopping = true;
  }
  context.changed.notify_all();
  if (context.engine.joinable()) context.engine.join();
  close(base->async_fd);
  delete &context;
  return 0;
}

EXPORT int ibv_query_device(ibv::Context*, ibv::DeviceAttr* attr) {
  *attr = {};
  attr->max_mr_size = 1ull << 40;
  attr->max_qp = kQps;
  attr->max_qp_wr = kMostWr;
  attr->max_sge = 4;
  attr->max_cqe = kMostCqe;
  attr->max_mr = kMrs;
  attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
  attr->phys_port_cnt = 1;
  return 0;
}

EXPORT int ibv_query_port(ibv::Context* context, uint8_t port, ibv::PortAttr* attr) {
  if (port != 1) return EINVAL;
  *attr = {};
  attr->state = fabric().down[of(context).device->number] != 0 ? 1 : ibv::kPortActive;
  attr->max_mtu = attr->active_mtu = 3 + static_cast<int>(of(context).device->number % 2);
  attr->gid_tbl_len = 2;
  attr->max_msg_sz = 1u << 30;
  attr->link_layer = ibv::kEthernet;
  attr->active_width = 2;
  attr->active_speed = 32;
  return 0;
}

EXPORT int ibv_query_gid(ibv::Context* context, uint8_t, int index, ibv::Gid* gid) {
  if (index > 1) return EINVAL;
  *gid = gid_of(of(context).device->number, index);
  return 0;
}

EXPORT ssize_t _ibv_query_gid_table(ibv::Context* context, ibv::GidEntry* entries, size_t capacity, uint32_t,
                                    size_t size) {
  if (size != sizeof(ibv::GidEntry) || capacity < 2) return -EINVAL;
  for (uint32_t i = 0; i < 2; ++i)
    entries[i] = {gid_of(of(context).device->number, static_cast<int>(i)), i, 1, i + 1, 0};
  return 2;
}

EXPORT int ibv_get_async_event(ibv::Context* context, ibv::AsyncEvent* event) {
  uint64_t one = 0;
  if (read(context->async_fd, &one, sizeof one) != sizeof one) return -1;
  event->event_type = ibv::kEventPortErr;
  return 0;
}
EXPORT void ibv_ack_async_event(ibv::AsyncEvent*) {}

EXPORT ibv::Pd* ibv_alloc_pd(ibv::Context* base) {
  ++of(base).users;
  return reinterpret_cast<ibv::Pd*>(new Pd{&of(base), ++fabric().next});
}
EXPORT int ibv_dealloc_pd(ibv::Pd* base) {
  auto* pd = reinterpret_cast<Pd*>(base);
  if (pd->users != 0) return violated("a protection domain is freed before what uses it"), EBUSY;
  --pd->context->users;
  delete pd;
  return 0;
}

// Counts the registrations that are under way, and lets this one wait for others where a test asks for that.
class Registering {
 public:
  Registering() {
    Fabric& shared = fabric();
    uint32_t now = ++shared.registering;
    uint32_t most = shared.most_registering;
    while (most < now && !shared.most_registering.compare_exchange_weak(most, now)) {
    }
    auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (shared.most_registering < shared.gather) {
      if (std::chrono::steady_clock::now() > deadline) shared.gather = 0;
      std::this_thread::yield();
    }
  }
  ~Registering() { --fabric().registering; }
};

EXPORT ibv::Mr* ibv_reg_mr_iova2(ibv::Pd* base, void* address, size_t length, uint64_t iova,
                                 unsigned access) {
  Registering registering;
  auto* pd = reinterpret_cast<Pd*>(base);
  if ((access & ibv::kRemoteWrite) != 0 && (access & ibv::kLocalWrite) == 0) return fail<ibv::Mr>(EINVAL);
  if (length == 0 || (reinterpret_cast<uint64_t>(address) ^ iova) % 4096 != 0) {
    violated("the device address has another place in its page than the memory");
    return fail<ibv::Mr>(EINVAL);
  }
  Fabric& shared = fabric();
  std::lock_guard lock(shared.table);
  for (uint32_t tried = 0; tried < kMrs; ++tried) {
    uint32_t serial = ++shared.next;
    MrEntry& mr = shared.mrs[serial % kMrs];
    if (mr.key != 0 && !dead(mr.pid)) continue;
    mr.pd = pd->id;
    mr.device = pd->context->device->number;
    mr.pid = getpid();
    mr.access = access;
    mr.address = reinterpret_cast<uint64_t>(address);
    mr.iova = iova;
    mr.length = length;
    mr.mapped = 0;
    mr.key = (serial % kMrs) << 8 | (serial / kMrs & 0xff) | 1;
    ++pd->users;
    return new ibv::Mr{&pd->context->base, base, address, length, 0, mr.key, mr.key};
  }
  return fail<ibv::Mr>(ENOMEM);
}
EXPORT ibv::Mr* ibv_reg_mr(ibv::Pd* pd, void* address, size_t length, int access) {
  return ibv_reg_mr_iova2(pd, address, length, reinterpret_cast<uint64_t>(address),
                          static_cast<unsigned>(access));
}
// Any descriptor that can be mapped stands for a DMA-BUF.
EXPORT ibv::Mr* ibv_reg_dmabuf_mr(ibv::Pd* pd, uint64_t offset, size_t length, uint64_t iova, int fd,
                                  int access) {
  if ((offset ^ iova) % 4096 != 0) {
    violated("the device address has another place in its page than the DMA-BUF");
    return fail<ibv::Mr>(EINVAL);
  }
  uint64_t before = offset % 4096;
  void* at = mmap(nullptr, before + length, PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                  static_cast<off_t>(offset - before));
  if (at == MAP_FAILED) return nullptr;
  ibv::Mr* made =
      ibv_reg_mr_iova2(pd, static_cast<char*>(at) + before, length, iova, static_cast<unsigned>(access));
  if (made == nullptr) return munmap(at, before + length), nullptr;
  fabric().mrs[made->lkey >> 8].mapped = before + length;
  return made;
}
EXPORT int ibv_dereg_mr(ibv::Mr* mr) {
  MrEntry& entry = fabric().mrs[mr->lkey >> 8];
  std::lock_guard lock(entry.lock);  // until no device touches the memory
  entry.key = 0;
  if (entry.mapped != 0) munmap(reinterpret_cast<void*>(entry.address / 4096 * 4096), entry.mapped);
  --reinterpret_cast<Pd*>(mr->pd)->users;
  delete mr;
  return 0;
}

EXPORT ibv::CompChannel* ibv_create_comp_channel(ibv::Context* context) {
  ++of(context).users;
  auto* made = new Channel{};
  made->base = {context, eventfd(0, EFD_CLOEXEC | EFD_SEMAPHORE), 0};
  return &made->base;
}
EXPORT int ibv_destroy_comp_channel(ibv::CompChannel* base) {
  --of(base->context).users;
  close(base->fd);
  delete reinterpret_cast<Channel*>(base);
  return 0;
}

EXPORT ibv::Cq* ibv_create_cq(ibv::Context* context, int cqe, void* user, ibv::CompChannel* channel, int) {
  if (cqe < 1 || cqe > kMostCqe) return fail<ibv::Cq>(EINVAL);
  ++of(context).users;
  auto* made = new Cq{};
  made->base.context = context;
  made->base.channel = channel;
  made->base.cq_context = user;
  made->base.cqe = cqe;
  made->ring.resize(static_cast<size_t>(cqe));
  if (channel != nullptr) reinterpret_cast<Channel*>(channel)->cq = made;
  std::lock_guard lock(of(context).mutex);
  of(context).cqs.push_back(made);
  return &made->base;
}
EXPORT int ibv_destroy_cq(ibv::Cq* base) {
  auto* cq = reinterpret_cast<Cq*>(base);
  if (cq->users != 0) return violated("a completion queue is destroyed before its queue pairs"), EBUSY;
  if (cq->reported != cq->acknowledged) violated("completion events were not acknowledged: this would hang");
  {
    std::lock_guard lock(of(base->context).mutex);
    std::erase(of(base->context).cqs, cq);
  }
  --of(base->context).users;
  delete cq;
  return 0;
}
EXPORT int ibv_get_cq_event(ibv::CompChannel* base, ibv::Cq** cq, void** user) {
  uint64_t one = 0;
  if (read(base->fd, &one, sizeof one) != sizeof one) return -1;
  Cq* known = reinterpret_cast<Channel*>(base)->cq;
  std::lock_guard lock(known->mutex);
  ++known->reported;
  *cq = &known->base;
  *user = known->base.cq_context;
  return 0;
}
EXPORT void ibv_ack_cq_events(ibv::Cq* base, unsigned count) {
  auto* cq = reinterpret_cast<Cq*>(base);
  std::lock_guard lock(cq->mutex);
  cq->acknowledged += count;
}

EXPORT ibv::Qp* ibv_create_qp(ibv::Pd* base, ibv::QpInitAttr* attr) {
  auto* pd = reinterpret_cast<Pd*>(base);
  const ibv::QpCap& cap = attr->cap;
  if (cap.max_send_wr > kMostWr || cap.max_inline_data > kMostInline || cap.max_send_sge > 4 ||
      attr->qp_type != ibv::kReliableConnection) {
    return fail<ibv::Qp>(EINVAL);
  }
  Fabric& shared = fabric();
  std::lock_guard lock(shared.table);
  for (uint32_t tried = 0; tried < kQps; ++tried) {
    uint32_t serial = ++shared.next;
    QpEntry& entry = shared.qps[serial % kQps];
    if (entry.number != 0 && !dead(entry.pid)) continue;
    auto* made = new Qp{};
    made->entry = serial % kQps;
    made->init = *attr;
    made->base.context = &pd->context->base;
    made->base.pd = base;
    made->base.send_cq = attr->send_cq;
    made->base.recv_cq = attr->recv_cq;
    made->base.qp_num = (serial & 0xfff) | ((serial >> 12) % 0xfff + 1) << 12;
    entry.state = ibv::kReset;
    entry.pid = getpid();
    entry.device = pd->context->device->number;
    entry.pd = pd->id;
    entry.number = made->base.qp_num;
    ++pd->users;
    entry.receives_count = entry.received_count = 0;
    ++reinterpret_cast<Cq*>(attr->send_cq)->users;
    std::lock_guard with_engine(pd->context->mutex);
    if (attr->recv_cq != attr->send_cq) reinterpret_cast<Cq*>(attr->recv_cq)->receivers.push_back(made);
    if (attr->recv_cq != attr->send_cq) reinterpret_cast<Cq*>(attr->recv_cq)->receives = true;
    pd->context->qps.push_back(made);
    return &made->base;
  }
  return fail<ibv::Qp>(ENOMEM);
}

EXPORT int ibv_modify_qp(ibv::Qp* base, ibv::QpAttr* attr, int mask) {
  auto& qp = *reinterpret_cast<Qp*>(base);
  QpEntry& entry = fabric().qps[qp.entry];
  constexpr int kToInit = ibv::kQpState | ibv::kQpPkeyIndex | ibv::kQpPort | ibv::kQpAccessFlags;
  constexpr int kToReceive = ibv::kQpState | ibv::kQpAv | ibv::kQpPathMtu | ibv::kQpDestQpn | ibv::kQpRqPsn |
                             ibv::kQpMaxDestRdAtomic | ibv::kQpMinRnrTimer;
  constexpr int kToSend = ibv::kQpState | ibv::kQpTimeout | ibv::kQpRetryCnt | ibv::kQpRnrRetry |
                          ibv::kQpSqPsn | ibv::kQpMaxQpRdAtomic;
  std::lock_guard lock(qp.mutex);
  int next = attr->qp_state;
  bool legal = next == ibv::kError || (qp.state == ibv::kReset && next == ibv::kInit && mask == kToInit) ||
               (qp.state == ibv::kInit && next == ibv::kReadyToReceive && mask == kToReceive) ||
               (qp.state == ibv::kReadyToReceive && next == ibv::kReadyToSend && mask == kToSend);
  if (!legal) return violated("a queue pair is moved to a state that it cannot reach so"), EINVAL;
  if (next == ibv::kInit) entry.access = attr->qp_access_flags;
  if (next == ibv::kReadyToReceive) {
    if (attr->ah_attr.is_global == 0) return violated("RoCE needs a global address"), EINVAL;
    entry.dest = attr->dest_qp_num;
    entry.rq_psn = attr->rq_psn;
    entry.mtu = attr->path_mtu;
    entry.dest_device = attr->ah_attr.grh.dgid.raw[15] - 1u;
    entry.max_dest_rd_atomic = attr->max_dest_rd_atomic;
    entry.traffic_class = attr->ah_attr.grh.traffic_class;
    entry.service_level = attr->ah_attr.sl;
  }
  if (next == ibv::kReadyToSend) {
    entry.sq_psn = attr->sq_psn;
    qp.max_rd_atomic = attr->max_rd_atomic;
  }
  qp.state = next;
  entry.state = next;
  if (next == ibv::kError) flush(qp);
  return 0;
}

EXPORT int ibv_destroy_qp(ibv::Qp* base) {
  auto& qp = *reinterpret_cast<Qp*>(base);
  auto& context = of(base->context);
  QpEntry& entry = fabric().qps[qp.entry];
  while (fabric().sluggish[context.device->number] != 0)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  {
    std::lock_guard lock(entry.lock);  // until no peer moves anything through it
    entry.state = ibv::kReset;
  }
  {
    std::unique_lock lock(context.mutex);
    context.idle.wait(lock, [&] {
      std::lock_guard inner(qp.mutex);
      return !qp.busy;
    });
    std::erase(context.qps, &qp);
    auto& received = *reinterpret_cast<Cq*>(base->recv_cq);
    if (base->recv_cq != base->send_cq) collect(received);  // what came stays in the queue
    std::erase(received.receivers, &qp);
    entry.number = 0;  // and may be another's
  }
  auto& cq = *reinterpret_cast<Cq*>(base->send_cq);
  {
    std::lock_guard lock(cq.mutex);
    for (Cq::Entry& done : cq.ring) done.qp = done.qp == &qp ? nullptr : done.qp;
  }
  --cq.users;
  --reinterpret_cast<Pd*>(base->pd)->users;
  delete &qp;
  return 0;
}

EXPORT const char* ibv_wc_status_str(int status) {
  switch (status) {
    case ibv::kSuccess:
      return "success";
    case ibv::kLocProtErr:
      return "local protection error";
    case ibv::kWrFlushErr:
      return "work request flushed";
    case ibv::kRemAccessErr:
      return "remote access error";
    case ibv::kRetryExcErr:
      return "transport retry counter exceeded";
    default:
      return "another error";
  }
}

// What a benchmark or a test wants to know: doorbells, work requests, signalled ones, inline ones.
EXPORT void verbs_double_counters(uint64_t counters[4]) {
  counters[0] = doorbells, counters[1] = requests, counters[2] = signalled, counters[3] = inlined;
}

}  // namespace verbs_double
