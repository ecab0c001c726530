#include "endpoint.hpp"

#include <cstring>
#include <utility>

#include "support/table.hpp"

namespace mooncake::nvlink {
namespace {

constexpr double kCloseWaitS = 5.0;  // for copies that are under way; they take milliseconds

Status name(mc_handle made, mc_handle* out) {
  if (made == 0) return failed(MC_NO_MEMORY, "there are as many handles as there can be; release some");
  *out = made;
  return {};
}

Status no_memory() { return failed(MC_INVALID, "no memory is registered under this handle"); }

}  // namespace

Endpoint::Endpoint(const Options& options, const Cuda& cuda)
    : options_(options),
      generation_(driver::fork_generation()),
      devices_(cuda),
      completions_(options.queue_depth),
      copies_(devices_, completions_, options.streams),
      stage_server_(devices_, copies_),
      stage_client_(loop_, devices_, copies_, completions_) {}

Status Endpoint::open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint) {
  Options parsed;
  if (Status status = parse_options(options, count, parsed); !status.ok()) return status;
  const Cuda* cuda = nullptr;
  if (Status status = Cuda::load(parsed.library, cuda); !status.ok()) return status;
  auto made = std::make_shared<Endpoint>(parsed, *cuda);
  if (Status status = made->start(); !status.ok()) return status;
  endpoint = std::move(made);
  return {};
}

Status Endpoint::start() {
  if (generation_ == 0) return failed(MC_NO_MEMORY, "no memory to keep watch for forks");
  if (Status status = driver::make_address("nvlink", address_); !status.ok()) return status;
  bool fabric =
      options_.fabric == "on" ||
      (options_.fabric == "auto" && devices_.all_have(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED));
  if (fabric) {
    if (Status status = driver::parse_host(options_.host, address_.host); !status.ok()) return status;
  }
  if (Status status = completions_.open(); !status.ok()) return status;
  driver::GrantorHooks granting;
  granting.describe = [this](driver::Session& peer, const driver::Owned& region, uint32_t access,
                             driver::Offer& offer) {
    return describe(devices_, peer, static_cast<const Region&>(region), access, offer);
  };
  granting.on_message = [this](const std::shared_ptr<driver::Session>& session,
                               const driver::Message& message, UniqueFd passed) {
    return stage_server_.on_message(*grantor_, session, message, passed);
  };
  driver::Grantor::Settings settings{options_.answer_timeout_s, options_.allow_other_users, fabric};
  grantor_ = std::make_unique<driver::Grantor>(loop_, settings, address_, std::move(granting));
  driver::AskerHooks asking;
  asking.open = [this](const std::shared_ptr<driver::Link>& link, const driver::Message& grant,
                       std::vector<driver::Offer::Part> parts, std::shared_ptr<driver::Opened>& opened) {
    std::shared_ptr<RemoteMemory> memory;
    Status status = open_memory(devices_, link, grant, std::move(parts), memory);
    opened = std::move(memory);
    return status;
  };
  asking.on_message = [this](const std::shared_ptr<driver::Link>& link, const driver::Message& message,
                             UniqueFd) { return stage_client_.on_message(link, message); };
  asking.ended = [this](const std::shared_ptr<driver::Link>& link, const Status& why) {
    stage_client_.on_end(link, why);
  };
  asking.nudge = [this] { copies_.reap(); };
  asking.over_tcp = fabric;
  asker_ = std::make_unique<driver::Asker>(loop_, options_.answer_timeout_s, address_, std::move(asking));
  stage_client_.set_asker(*asker_);
  if (Status status = loop_.start("mc-nvlink"); !status.ok()) return status;
  if (Status status = copies_.start(); !status.ok()) return status;
  return grantor_->listen();
}

void Endpoint::close() {
  if (forked() || std::exchange(closed_, true)) return;
  if (asker_) asker_->close();
  copies_.close(driver::deadline_after(kCloseWaitS));
  if (grantor_) grantor_->close();
  loop_.stop();
  devices_.close();
}

Status Endpoint::caps(mc_caps& caps) const {
  caps.flags = MC_CAP_STREAM | (address_.port == 0 ? MC_CAP_SAME_HOST_ONLY : 0u);
  caps.memory_kinds = 1u << MC_CUDA | (options_.main_memory ? 1u << MC_DRAM : 0u);
  caps.bandwidth_bytes_per_s = 200'000'000'000;  // NVLink between two GPUs; the engine measures what it gets
  caps.latency_ns = 10'000;
  caps.in_flight_bytes = options_.in_flight_bytes;
  caps.in_flight_ops = options_.queue_depth;
  return {};
}

Status Endpoint::stats(mc_stats& stats) const {
  completions_.add_to(stats);
  stats.connections = asker_->open_connections();
  stats.refused = grantor_->refused();
  return {};
}

Status Endpoint::export_address(void* blob, size_t* length) const {
  return driver::copy_out(&address_, sizeof address_, blob, length);
}

Status Endpoint::connect(const void* address, size_t length, mc_handle* connection) {
  driver::Address peer;
  if (Status status = driver::read_address(address_, address, length, peer); !status.ok()) return status;
  if (!driver::same_host(address_, peer) && (peer.port == 0 || address_.port == 0))
    return failed(MC_UNREACHABLE,
                  "the peer is at another host or in another network namespace; the nvlink driver crosses "
                  "hosts only where the GPUs of both have fabric handles (multi-node NVLink with IMEX)");
  return name(connections_.add(asker_->connect(peer)), connection);
}

void Endpoint::disconnect(mc_handle connection) {
  if (auto taken = connections_.take(connection)) asker_->disconnect(taken);
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  if (memory.struct_size < offsetof(mc_memory, numa_node))
    return failed(MC_INVALID, "the memory description is of an unknown version");
  if (memory.kind != MC_CUDA && (memory.kind != MC_DRAM || !options_.main_memory))
    return failed(MC_UNSUPPORTED, options_.main_memory
                                      ? "the nvlink driver moves GPU and main memory only"
                                      : "the nvlink driver moves GPU memory only (option main_memory)");
  if (memory.address == 0 || memory.length == 0 || memory.address + memory.length < memory.address)
    return failed(MC_INVALID, "the memory is empty or wraps around the address space");
  std::shared_ptr<Region> region;
  if (Status status = make_region(devices_, memory, region); !status.ok()) return status;
  if (Status status = grantor_->add(region); !status.ok()) return status;
  return name(regions_.add(region), registered);
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return no_memory();
  if (Status status = grantor_->withdraw(region, deadline_ns); !status.ok()) return status;
  regions_.take(registered);
  // Not by the end of the object: whoever saw its last operation complete may hold it for a moment yet, and
  // the memory may be gone when this returns.
  region->place.pin.reset();
  return {};
}

Status Endpoint::export_key(mc_handle registered, void*, size_t* length) const {
  if (!regions_.get(registered)) return no_memory();
  *length = 0;  // the owner tells the rest when it is asked
  return {};
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                            const void*, size_t, mc_handle* remote) {
  std::shared_ptr<driver::Connection> peer = connections_.get(connection);
  if (!peer) return failed(MC_INVALID, "no connection has this handle");
  return name(remotes_.add(asker_->import(peer, region_id, driver::key_from(key))), remote);
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, void*, size_t* length) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return no_memory();
  *length = 0;
  return grantor_->grant(region, key, access);
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  return region ? grantor_->revoke(region, key, deadline_ns) : no_memory();
}

size_t Endpoint::poll(mc_completion* completions, size_t capacity) {
  copies_.reap();
  return completions_.poll(completions, capacity);
}

bool Endpoint::arm() {
  copies_.reap();
  if (!completions_.arm()) return false;
  copies_.watch();
  return true;
}

void Endpoint::cancel(uint64_t cookie) {
  Status why = failed(MC_CANCELLED, "the operation was cancelled");
  asker_->forget(cookie, why);
  stage_client_.cancel(cookie, why);
}

}  // namespace mooncake::nvlink
