#include "endpoint.hpp"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "support/calls.hpp"

namespace mooncake::verbs {
namespace {

constexpr uint64_t kLatencyNs = 3'000;

}  // namespace

Endpoint::Endpoint(const Options& options)
    : options_(options),
      generation_(driver::fork_generation()),
      completions_(options.queue_depth),
      regions_(device_, options_),
      inbox_(options_, device_, poller_),
      initiator_(options_, device_, regions_, completions_, poller_),
      target_(options_, device_, regions_, inbox_, poller_) {}

Status Endpoint::open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint) {
  Options parsed;
  if (Status status = parse_options(options, count, parsed); !status.ok()) return status;
  auto made = std::make_shared<Endpoint>(parsed);
  if (Status status = made->start(); !status.ok()) return status;
  endpoint = std::move(made);
  return {};
}

Status Endpoint::start() {
  if (generation_ == 0) return failed(MC_NO_MEMORY, "no memory to keep watch for forks");
  if (Status status = poller_.open(); !status.ok()) return status;
  if (Status status = completions_.open(); !status.ok()) return status;
  if (Status status = Device::open(options_, device_); !status.ok()) return status;
  if (Status status = inbox_.open(); !status.ok()) return status;
  if (Status status = initiator_.start(); !status.ok()) return status;
  if (Status status = target_.listen(); !status.ok()) return status;
  if (Status status = poller_.add(device_->async_fd(), Poller::kDevice, EPOLLIN); !status.ok()) return status;
  events_.reset(epoll_create1(EPOLL_CLOEXEC));
  for (int fd : {completions_.event_fd(), device_->channel()->fd, inbox_.fd()}) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(events_.get(), EPOLL_CTL_ADD, fd, &event) != 0)
      return system_failure(MC_IO, "cannot watch the completion descriptors", errno);
  }
  control_ = std::thread([this] { run(); });
  return {};
}

void Endpoint::close() {
  if (forked()) return;
  if (!control_.joinable()) return;
  stopping_ = true;
  poller_.wake();
  control_.join();
  initiator_.close();
  target_.close();
}

void Endpoint::run() {
  driver::prepare_thread("mc-verbs");
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    uint64_t next = std::min(initiator_.attend(), target_.attend());
    uint64_t now = driver::now_ns();
    uint64_t left_ms = next <= now ? 0 : (next - now) / 1'000'000 + 1;
    int timeout = next == ~uint64_t{0} ? -1 : static_cast<int>(std::min<uint64_t>(left_ms, 60'000));
    int count = poller_.wait(events.data(), static_cast<int>(events.size()), timeout);
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      switch (event.data.u64) {
        case Poller::kWake:
          poller_.drain();
          break;
        case Poller::kListener:
          target_.accept_peers();
          break;
        case Poller::kDevice:
          device_->read_events();
          if (device_->lost()) initiator_.lose_device();
          break;
        default:
          initiator_.on_socket(event.data.u64, event.events);
          target_.on_socket(event.data.u64, event.events);
      }
    }
  }
}

Status Endpoint::caps(mc_caps& caps) const {
  caps.memory_kinds = 1u << MC_DRAM;
  if (device_->verbs().reg_dmabuf_mr != nullptr) caps.memory_kinds |= 1u << MC_CUDA;
  caps.bandwidth_bytes_per_s = device_->bandwidth();
  caps.latency_ns = kLatencyNs;
  caps.in_flight_bytes = options_.window_bytes;
  caps.in_flight_ops = options_.queue_depth;
  caps.notice_bytes = MC_NOTICE_MAX;
  return {};
}

Status Endpoint::stats(mc_stats& stats) {
  completions_.add_to(stats);
  stats.connections = initiator_.open_connections();
  stats.refused = target_.refused();
  return {};
}

Status Endpoint::export_address(void* blob, size_t* length) const {
  std::string address = encode(target_.address());
  return driver::copy_out(address.data(), address.size(), blob, length);
}

Status Endpoint::connect(const void* address, size_t length, mc_handle* connection) {
  Address peer;
  if (Status status = decode({static_cast<const char*>(address), length}, peer); !status.ok()) return status;
  return connections_.add(initiator_.connect(std::move(peer)), connection);
}

void Endpoint::disconnect(mc_handle connection) {
  if (auto taken = connections_.take(connection)) initiator_.disconnect(taken);
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  std::shared_ptr<Region> region;
  if (Status status = regions_.add(memory, region); !status.ok()) return status;
  return locals_.add(std::move(region), registered);
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = locals_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (Status status = regions_.remove(*region, deadline_ns); !status.ok()) return status;
  locals_.take(registered);
  return {};
}

Status Endpoint::export_key(mc_handle registered, void*, size_t* length) {
  std::shared_ptr<Region> region = locals_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (Status status = regions_.expose(*region); !status.ok()) return status;
  *length = 0;  // who has the key is told the rest when it asks
  return {};
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                            const void*, size_t, mc_handle* remote) {
  std::shared_ptr<Connection> peer = connections_.get(connection);
  if (!peer) return failed(MC_INVALID, "no connection has this handle");
  return remotes_.add(initiator_.import(*peer, region_id, key), remote);
}

void Endpoint::release_key(mc_handle remote) {
  if (auto taken = remotes_.take(remote)) initiator_.release(*taken);
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, void*, size_t* length) {
  std::shared_ptr<Region> region = locals_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (Status status = regions_.grant(*region, key, access); !status.ok()) return status;
  *length = 0;
  return {};
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = locals_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  return regions_.revoke(*region, key, deadline_ns);
}

const Initiator::Names& Endpoint::look_up(const mc_op& op, Lookup& lookup) const {
  if (op.connection != lookup.connection || op.local != lookup.local || op.remote != lookup.remote) {
    const auto* connection = connections_.find(op.connection);
    const auto* region = locals_.find(op.local);
    const auto* remote = remotes_.find(op.remote);
    lookup = {op.connection, op.local, op.remote, {}};
    bool known = connection != nullptr && region != nullptr && remote != nullptr;
    if (known && (*remote)->connection == connection->get()) {
      lookup.names = {connection->get(), region->get(), remote->get(), {}};
    } else {
      lookup.names.status = failed(
          MC_INVALID, known ? "the remote memory belongs to another connection"
                            : "the operation names a connection, local or remote memory that is not there");
    }
  }
  if (!lookup.names.status.ok()) return lookup.names;
  uint64_t size = lookup.names.region->range.length;
  bool fits = op.length > 0 && op.local_offset <= size && op.length <= size - op.local_offset;
  if (fits && op.opcode <= MC_WRITE) [[likely]]
    return lookup.names;
  lookup.names.status =
      failed(MC_INVALID, fits ? "unknown operation" : "the range is empty or not inside the local region");
  lookup.connection = 0;  // the next one is looked at anew
  return lookup.names;
}

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  size_t taken = completions_.reserve(count);
  Lookup lookup;
  initiator_.submit(ops, taken,
                    [&](const mc_op& op) -> const Initiator::Names& { return look_up(op, lookup); });
  *accepted = taken;
  // Short enough to need no memory: the engine comes by here all the time.
  return taken == count ? Status{} : failed(MC_AGAIN, "queue is full");
}

size_t Endpoint::poll(mc_completion* completions, size_t capacity) {
  initiator_.progress();
  size_t count = completions_.poll(completions, capacity);
  initiator_.fetched(count);
  return count;
}

Status Endpoint::notify(mc_handle connection, const void* data, size_t length, uint64_t cookie) {
  std::shared_ptr<Connection> known = connections_.get(connection);
  if (!known) return failed(MC_INVALID, "no connection has this handle");
  if (length > MC_NOTICE_MAX)
    return failed(MC_INVALID, "a notice has at most " + std::to_string(MC_NOTICE_MAX) + " bytes");
  return initiator_.notify(*known, data, length, cookie);
}

Status Endpoint::late_writes(mc_handle connection, void* token, size_t* length) {
  std::shared_ptr<Connection> known = connections_.get(connection);
  if (!known) return failed(MC_INVALID, "no connection has this handle");
  return initiator_.late_writes(*known, token, length);
}

Status Endpoint::fence(const void* token, size_t length, uint64_t deadline_ns) {
  return target_.fence(token, length, deadline_ns);
}

}  // namespace mooncake::verbs
