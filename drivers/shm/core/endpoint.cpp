#include "endpoint.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <utility>

#include "support/calls.hpp"

namespace mooncake::shm {
namespace {

// Some milliseconds of copying: enough for every copy thread, little enough to leave the order to the engine.
constexpr uint64_t kInFlightBytes = 64 << 20;

// Whether [offset, offset + length) lies in [0, size), for any values.
bool inside(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

// A private copy of a memory's descriptor. Stays empty when peers could not map it safely: they use
// process_vm then.
Status adopt_descriptor(const mc_memory& memory, std::shared_ptr<const UniqueFd>& fd) {
  struct stat file{};
  if (fstat(memory.fd, &file) != 0) {
    return system_failure(MC_INVALID,
                          "the memory's descriptor " + std::to_string(memory.fd) + " cannot be used", errno);
  }
  if (!sealed_against_shrinking(memory.fd)) return {};
  if (!inside(memory.fd_offset, memory.length, static_cast<uint64_t>(file.st_size))) {
    return failed(MC_INVALID, "the memory's descriptor refers to a file that ends before the region does");
  }
  UniqueFd copy(fcntl(memory.fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return system_failure(MC_IO, "cannot duplicate the memory's descriptor", errno);
  fd = std::make_shared<const UniqueFd>(std::move(copy));
  return {};
}

}  // namespace

Endpoint::Endpoint(const Options& options)
    : options_(options),
      generation_(fork_generation()),
      completions_(options.queue_depth),
      pool_({"mc-shm-copy", options.workers, options.streaming_bytes, options.chunk_bytes}, completions_),
      target_(loop_, options_, address_),
      initiator_(loop_, pool_, options_) {}

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
  if (Status status = driver::make_address("shm", address_); !status.ok()) return status;
  if (Status status = completions_.open(); !status.ok()) return status;
  if (Status status = loop_.start("mc-shm-service"); !status.ok()) return status;
  if (Status status = pool_.start(); !status.ok()) return status;
  return target_.listen();
}

void Endpoint::close() {
  if (forked()) return;
  initiator_.close();
  pool_.stop();
  target_.close();
  loop_.stop();
}

Status Endpoint::caps(mc_caps& caps) const {
  caps.flags = MC_CAP_SAME_HOST_ONLY;
  caps.memory_kinds = 1u << MC_DRAM;
  caps.bandwidth_bytes_per_s = 10'000'000'000;  // one core's memory copy; the engine measures what it gets
  caps.latency_ns = 1'000;
  caps.inline_bytes = options_.inline_bytes;
  caps.in_flight_bytes = kInFlightBytes;
  caps.in_flight_ops = options_.queue_depth;
  return {};
}

Status Endpoint::stats(mc_stats& stats) const {
  completions_.add_to(stats);
  stats.connections = initiator_.open_connections();
  stats.refused = target_.refused();
  return {};
}

Status Endpoint::export_address(void* blob, size_t* length) const {
  return driver::copy_out(&address_, sizeof address_, blob, length);
}

Status Endpoint::connect(const void* address, size_t length, mc_handle* connection) {
  Address peer;
  if (Status status = driver::read_address(address_, address, length, peer); !status.ok()) return status;
  if (!driver::same_boot(address_, peer))
    return failed(MC_UNSUPPORTED, "the peer runs on another host; shared memory ends at this one");
  if (!driver::same_host(address_, peer)) {
    return failed(
        MC_UNREACHABLE,
        "the peer runs in another network namespace of this host, where nothing can be asked of it; "
        "start both in one (containers: the same pod, or the host's network) to share memory");
  }
  return connections_.add(initiator_.connect(peer), connection);
}

void Endpoint::disconnect(mc_handle connection) {
  if (auto taken = connections_.take(connection)) initiator_.disconnect(taken);
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  if (memory.struct_size < offsetof(mc_memory, numa_node))
    return failed(MC_INVALID, "the memory description is of an unknown version");
  if (memory.kind != MC_DRAM) return failed(MC_UNSUPPORTED, "the shm driver moves main memory only");
  if (memory.address == 0 || memory.length == 0 || memory.address + memory.length < memory.address) {
    return failed(MC_INVALID, "the memory is empty or wraps around the address space");
  }
  auto region = std::make_shared<Region>();
  region->id = memory.region_id;
  RegionKey own;
  std::copy(std::begin(memory.key), std::end(memory.key), own.key.begin());
  region->keys.push_back(own);
  region->base = reinterpret_cast<std::byte*>(memory.address);
  region->length = memory.length;
  region->fd_offset = memory.fd_offset;
  if (memory.fd >= 0) {
    if (Status status = adopt_descriptor(memory, region->fd); !status.ok()) return status;
  }
  if (Status status = target_.add(region); !status.ok()) return status;
  return regions_.add(region, registered);
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (Status status = target_.withdraw(region, deadline_ns); !status.ok()) return status;
  regions_.take(registered);
  return {};
}

Status Endpoint::export_key(mc_handle registered, void*, size_t* length) const {
  if (!regions_.get(registered)) return failed(MC_INVALID, "no memory is registered under this handle");
  *length = 0;  // the owner tells the rest when it is asked
  return {};
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                            const void*, size_t, mc_handle* remote) {
  std::shared_ptr<Connection> peer = connections_.get(connection);
  if (!peer) return failed(MC_INVALID, "no connection has this handle");
  return remotes_.add(initiator_.import(peer, region_id, driver::key_from(key)), remote);
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, void*, size_t* length) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (Status status = target_.grant(region, driver::key_from(key), access); !status.ok()) return status;
  *length = 0;
  return {};
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  return target_.revoke(region, key, deadline_ns);
}

void Endpoint::cancel(uint64_t cookie) {
  pool_.end_cookie(cookie, failed(MC_CANCELLED, "the operation was cancelled"));
}

}  // namespace mooncake::shm
