#include "device.hpp"

#include <fcntl.h>
#include <net/if.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <vector>

#include "support/os.hpp"

namespace mooncake::verbs {
namespace {

constexpr uint64_t kGiB = 1ull << 30;

// Bytes a second of a port, from its width and speed as verbs encodes them.
uint64_t bandwidth_of(const ibv::PortAttr& port) {
  double lanes = port.active_width == 2    ? 4
                 : port.active_width == 4  ? 8
                 : port.active_width == 8  ? 12
                 : port.active_width == 16 ? 2
                                           : 1;
  double gigabits = 2.5;  // a lane
  switch (port.active_speed) {
    case 2:
      gigabits = 5;
      break;
    case 4:
      gigabits = 10;
      break;
    case 8:
      gigabits = 10;
      break;
    case 16:
      gigabits = 14;
      break;
    case 32:
      gigabits = 25;
      break;
    case 64:
      gigabits = 50;
      break;
    case 128:
      gigabits = 100;
      break;
    default:
      break;
  }
  return static_cast<uint64_t>(lanes * gigabits * 1e9 / 8);
}

Status nonblocking(int fd) {
  int flags = fcntl(fd, F_GETFL);
  if (flags >= 0 && fcntl(fd, F_SETFL, flags | O_NONBLOCK) == 0) return {};
  return system_failure(MC_IO, "cannot make a descriptor of the device non-blocking", errno);
}

}  // namespace

Status Device::open(const Options& options, std::unique_ptr<Device>& device) {
  const Verbs* verbs = nullptr;
  if (Status status = Verbs::get(options.library, &verbs); !status.ok()) return status;
  std::unique_ptr<Device> made(new Device(*verbs));
  made->wanted_gid_ = options.gid_index;
  made->wanted_mtu_ = options.mtu == 0 ? 0 : std::countr_zero(options.mtu) - 7;
  if (Status status = made->find(options); !status.ok()) return status;
  if (Status status = made->prepare(options); !status.ok()) return status;
  device = std::move(made);
  return {};
}

Device::~Device() {
  if (cq_ != nullptr) verbs_.destroy_cq(cq_);
  if (channel_ != nullptr) verbs_.destroy_comp_channel(channel_);
  if (pd_ != nullptr) verbs_.dealloc_pd(pd_);
  if (context_ != nullptr) verbs_.close_device(context_);
}

Status Device::find(const Options& options) {
  int count = 0;
  ibv::Device** list = verbs_.get_device_list(&count);
  if (list == nullptr) return system_failure(MC_UNSUPPORTED, "cannot list RDMA devices", errno);
  Status status = failed(MC_UNSUPPORTED, "there is no RDMA device; load its kernel module");
  std::string known;
  bool found = false;
  for (int i = 0; i < count && !found; ++i) {
    const char* name = verbs_.get_device_name(list[i]);
    known += std::string(known.empty() ? "" : ", ") + name;
    if (!options.device.empty() && options.device != name) continue;
    status = open_port(list[i], options);
    found = status.ok() || !options.device.empty();
  }
  verbs_.free_device_list(list);
  if (!found && !options.device.empty() && count > 0)
    return failed(MC_UNSUPPORTED, "there is no RDMA device '" + options.device + "'; there are: " + known);
  return status;
}

Status Device::open_port(ibv::Device* device, const Options& options) {
  std::string name = verbs_.get_device_name(device);
  ibv::Context* context = verbs_.open_device(device);
  if (context == nullptr)
    return system_failure(MC_IO, "cannot open RDMA device " + name + " (check /dev/infiniband)", errno);
  Status status;
  if (int error = verbs_.query_device(context, &limits_); error != 0)
    status = system_failure(MC_IO, "cannot query " + name, error);
  int first = options.port != 0 ? static_cast<int>(options.port) : 1;
  int last = options.port != 0 ? first : limits_.phys_port_cnt;
  for (int port = first; status.ok() && port <= last; ++port) {
    ibv::PortAttr attr{};
    if (int error = verbs_.query_port(context, static_cast<uint8_t>(port), &attr); error != 0)
      status = system_failure(MC_IO, name + " has no port " + std::to_string(port), error);
    if (!status.ok() || attr.state != ibv::kPortActive) continue;
    name_ = name;
    port_ = port;
    context_ = context;
    max_message_ = attr.max_msg_sz != 0 ? attr.max_msg_sz : 1u << 30;
    bandwidth_ = bandwidth_of(attr);
    return {};
  }
  verbs_.close_device(context);
  if (!status.ok()) return status;
  return failed(MC_IO, "no port of RDMA device " + name + " is active; connect it and set its interface up");
}

Status Device::prepare(const Options& options) {
  auto need = [&](const void* made, const char* what) {
    return made != nullptr ? Status{} : system_failure(MC_IO, name_ + ": cannot create " + what, errno);
  };
  pd_ = verbs_.alloc_pd(context_);
  if (Status status = need(pd_, "a protection domain"); !status.ok()) return status;
  channel_ = verbs_.create_comp_channel(context_);
  if (Status status = need(channel_, "a completion channel"); !status.ok()) return status;
  int depth = std::min(static_cast<int>(options.completion_depth), limits_.max_cqe);
  cq_ = verbs_.create_cq(context_, depth, nullptr, channel_, 0);
  if (Status status = need(cq_, "a completion queue"); !status.ok()) return status;
  if (Status status = nonblocking(channel_->fd); !status.ok()) return status;
  if (Status status = nonblocking(context_->async_fd); !status.ok()) return status;
  uint64_t start = 0;
  if (Status status = driver::fill_random(&start, sizeof start); !status.ok()) return status;
  // Within 2^41 .. 2^60: devices may have fewer than 64 bits, and there is room for all that will come.
  next_iova_ = (1ull << 41) + (start % (1ull << 59)) / kGiB * kGiB;
  PortAddress address;
  return look(address);
}

Status Device::look(PortAddress& address) const {
  auto port = static_cast<uint8_t>(port_);
  ibv::PortAttr attr{};
  if (int error = verbs_.query_port(context_, port, &attr); error != 0)
    return system_failure(MC_IO, "cannot query port " + std::to_string(port_) + " of " + name_, error);
  if (attr.state != ibv::kPortActive)
    return failed(MC_IO, "port " + std::to_string(port_) + " of " + name_ + " is down");
  address.lid = attr.lid;
  address.ethernet = attr.link_layer == ibv::kEthernet;
  address.mtu = wanted_mtu_ == 0 ? attr.active_mtu : std::min(wanted_mtu_, attr.active_mtu);
  std::vector<GidCandidate> candidates;
  if (wanted_gid_ >= 0 || verbs_.query_gid_table == nullptr) {
    GidCandidate& only = candidates.emplace_back();
    only.index = std::max(wanted_gid_, 0);
    if (int error = verbs_.query_gid(context_, port, only.index, &only.gid); error != 0)
      return system_failure(MC_IO, name_ + " has no GID " + std::to_string(only.index), error);
  } else {
    std::vector<ibv::GidEntry> entries(static_cast<size_t>(std::max(attr.gid_tbl_len, 1)) *
                                       std::max<size_t>(limits_.phys_port_cnt, 1));
    ssize_t count = verbs_.query_gid_table(context_, entries.data(), entries.size(), 0, sizeof entries[0]);
    if (count < 0) return system_failure(MC_IO, "cannot read the GIDs of " + name_, static_cast<int>(-count));
    for (ssize_t i = 0; i < count; ++i) {
      const ibv::GidEntry& entry = entries[static_cast<size_t>(i)];
      if (entry.port_num != port) continue;
      char interface[IF_NAMESIZE] = "";
      if (entry.ndev_ifindex != 0) if_indextoname(entry.ndev_ifindex, interface);
      candidates.push_back({entry.gid, static_cast<int>(entry.gid_index), entry.gid_type, interface});
    }
  }
  const GidCandidate* best = best_gid(candidates, address.ethernet);
  if (best == nullptr) {
    if (!address.ethernet && address.lid != 0) return {};  // InfiniBand finds the peer by its LID
    return failed(MC_IO, "port " + std::to_string(port_) + " of " + name_ +
                             " has no address; give its network interface one");
  }
  address.gid = best->gid;
  address.gid_index = best->index;
  return {};
}

void Device::read_events() {
  ibv::AsyncEvent event{};
  while (verbs_.get_async_event(context_, &event) == 0) {
    if (event.event_type == ibv::kEventDeviceFatal || event.event_type == ibv::kEventCqErr)
      lost_.store(true, std::memory_order_relaxed);
    verbs_.ack_async_event(&event);
  }
}

bool Device::take_events(ibv::CompChannel* channel) const {
  ibv::Cq* cq = nullptr;
  void* context = nullptr;
  unsigned events = 0;
  while (verbs_.get_cq_event(channel, &cq, &context) == 0) ++events;
  if (events > 0) verbs_.ack_cq_events(cq, events);
  return events > 0;
}

uint64_t Device::take_iova(uint64_t address, uint64_t length) {
  uint64_t room = (length + 2 * kGiB - 1) / kGiB * kGiB;
  return next_iova_.fetch_add(room) + address % kGiB;
}

}  // namespace mooncake::verbs
