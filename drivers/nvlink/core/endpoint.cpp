#include "endpoint.hpp"

#include <cstddef>
#include <utility>

namespace mooncake::nvlink {
namespace {

constexpr double kCloseWaitS = 5.0;  // for copies that are under way; they take milliseconds

}  // namespace

Endpoint::Endpoint(const Options& options, const Cuda& cuda)
    : PeerEndpoint(options.queue_depth),
      options_(options),
      devices_(cuda),
      copies_(devices_, completions_, options.streams),
      pieces_(loop_, devices_),
      stage_server_(devices_, pieces_),
      stage_client_(loop_, devices_, pieces_, completions_, asker_) {}

Status Endpoint::open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint) {
  Options parsed;
  if (Status status = parse_options(options, count, parsed); !status.ok()) return status;
  const Cuda* cuda = nullptr;
  if (Status status = driver::cuda::load(parsed.library, cuda); !status.ok()) return status;
  auto made = std::make_shared<Endpoint>(parsed, *cuda);
  if (Status status = made->start(); !status.ok()) return status;
  endpoint = std::move(made);
  return {};
}

Status Endpoint::start() {
  if (Status status = driver::make_address("nvlink", address_); !status.ok()) return status;
  bool fabric =
      options_.fabric == "on" ||
      (options_.fabric == "auto" && devices_.all_have(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED));
  if (fabric) {
    if (Status status = driver::parse_host(options_.host, address_.host); !status.ok()) return status;
  }
  if (Status status = copies_.start(); !status.ok()) return status;
  driver::GrantorHooks granting;
  granting.describe = [this](driver::Session& peer, const driver::Owned& region, uint32_t access,
                             driver::Offer& offer) {
    return describe(devices_, peer, static_cast<const Region&>(region), access, offer);
  };
  granting.on_message = [this](const std::shared_ptr<driver::Session>& session,
                               const driver::Message& message, UniqueFd passed) {
    return stage_server_.on_message(*grantor_, session, message, passed);
  };
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
  driver::Grantor::Settings settings{options_.answer_timeout_s, options_.allow_other_users, fabric};
  return start_peers("mc-nvlink", settings, std::move(granting), std::move(asking));
}

void Endpoint::close() {
  if (forked() || std::exchange(closed_, true)) return;
  if (asker_) asker_->close();
  copies_.settle(driver::deadline_after(kCloseWaitS));
  if (grantor_) grantor_->close();
  loop_.stop();  // it launches copies too
  pieces_.close(driver::deadline_after(kCloseWaitS));
  copies_.close(driver::deadline_after(kCloseWaitS));
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
  return add_region(std::move(region), registered);
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
