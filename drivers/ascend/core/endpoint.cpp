#include "endpoint.hpp"

#include <cstddef>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

namespace mooncake::ascend {
namespace {

// One call of HIXL: enough for its batches, little enough to end soon.
constexpr size_t kMostInBatch = 256;
constexpr uint64_t kBatchBytes = 16 << 20;

// For memory that could not be added, or that the engine never took back.
constexpr double kLetGoS = 10.0;

}  // namespace

Region::~Region() {
  if (worker != nullptr) (void)let_go(driver::deadline_after(kLetGoS));
}

Status Region::let_go(uint64_t deadline_ns) {
  std::shared_ptr<Removal> begun;
  {
    std::lock_guard lock(mutex);
    if (worker == nullptr) return {};
    if (!removal) removal = worker->remove_memory(memory);
    begun = removal;
  }
  if (Status status = begun->wait(deadline_ns); !status.ok()) return status;
  std::lock_guard lock(mutex);
  worker = nullptr;
  return {};
}

Endpoint::Endpoint(const Options& options)
    : PeerEndpoint(options.queue_depth),
      options_(options),
      worker_(std::make_shared<Worker>(options_, completions_)) {}

Status Endpoint::open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint) {
  Options parsed;
  if (Status status = parse_options(options, count, parsed); !status.ok()) return status;
  auto made = std::make_shared<Endpoint>(parsed);
  if (Status status = made->start(); !status.ok()) return status;
  endpoint = std::move(made);
  return {};
}

Status Endpoint::start() {
  if (Status status = worker_->start(engine_); !status.ok()) return status;
  if (Status status = driver::make_address("ascend", address_); !status.ok()) return status;
  if (Status status = driver::parse_host(options_.host, address_.host); !status.ok()) return status;
  driver::GrantorHooks granting;
  granting.describe = [this](driver::Session& session, const driver::Owned& region, uint32_t,
                             driver::Offer& offer) {
    return describe(static_cast<const Region&>(region), session.peer, offer);
  };
  driver::AskerHooks asking;
  asking.open = [this](const std::shared_ptr<driver::Link>& link, const driver::Message& grant,
                       std::vector<driver::Offer::Part>,
                       std::shared_ptr<driver::Opened>& opened) { return open_memory(link, grant, opened); };
  asking.over_tcp = true;
  driver::Grantor::Settings settings{options_.answer_timeout_s, options_.allow_other_users, true};
  return start_peers("mc-ascend-peers", settings, std::move(granting), std::move(asking));
}

void Endpoint::close() {
  if (forked() || std::exchange(closed_, true)) return;
  if (asker_) asker_->close();
  // Peers let go first: HIXL gives nothing back while a link may use it.
  if (grantor_) grantor_->close();
  worker_->stop();
  loop_.stop();
}

Status Endpoint::caps(mc_caps& caps) const {
  caps.memory_kinds = 1u << MC_CUDA | 1u << MC_DRAM;
  caps.bandwidth_bytes_per_s = 25'000'000'000;  // one RoCE port of an NPU; the engine measures what it gets
  caps.latency_ns = 50'000;
  caps.in_flight_bytes = options_.in_flight_bytes;
  caps.in_flight_ops = options_.queue_depth;
  return {};
}

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  if (memory.struct_size < offsetof(mc_memory, numa_node))
    return failed(MC_INVALID, "the memory description is of an unknown version");
  if (memory.kind != MC_CUDA && memory.kind != MC_DRAM)
    return failed(MC_UNSUPPORTED, "the ascend driver moves memory of NPUs and main memory only");
  if (memory.address == 0 || memory.length == 0 || memory.address + memory.length < memory.address)
    return failed(MC_INVALID, "the memory is empty or wraps around the address space");
  auto region = std::make_shared<Region>(memory.region_id, memory.length, memory.key);
  region->memory = {memory.address, memory.length, memory.kind == MC_CUDA, false, false};
  if (region->memory.on_device && memory.device != static_cast<int32_t>(options_.device))
    return failed(MC_UNSUPPORTED, "this endpoint is of NPU " + std::to_string(options_.device) +
                                      ", the memory of NPU " + std::to_string(memory.device) +
                                      "; name it in option devices");
  if (Status status = worker_->add_memory(region->memory); !status.ok()) return status;
  region->worker = worker_;
  region->generation = worker_->generation();
  return add_region(std::move(region), registered);
}

Status Endpoint::describe(const Region& region, const driver::PeerInfo&, driver::Offer& offer) const {
  GrantBody body{};
  body.address = region.memory.address;
  body.generation = region.generation;
  body.on_device = region.memory.on_device;
  body.pinned = region.memory.pinned;
  std::strncpy(body.engine, engine_.c_str(), sizeof body.engine - 1);
  put_body(offer.grant, body);
  return {};
}

Status Endpoint::open_memory(const std::shared_ptr<driver::Link>& link, const driver::Message& grant,
                             std::shared_ptr<driver::Opened>& opened) {
  GrantBody body;
  if (!get_body(grant, body) || grant.length == 0 || body.address + grant.length < body.address)
    return failed(MC_UNREACHABLE, "the peer's grant is garbled");
  auto made = std::make_shared<RemoteMemory>();
  made->address = body.address;
  made->on_device = body.on_device != 0;
  made->pinned = body.pinned != 0;
  made->generation = body.generation;
  made->worker = worker_;
  if (!link->peer.same_process) made->engine.assign(body.engine, strnlen(body.engine, sizeof body.engine));
  opened = std::move(made);
  return {};
}

// ------------------------------------------------------------------------------------------------ submitting

// The operations of one call, in batches of one peer, direction and kind of memory: HIXL takes no others.
class Endpoint::Plan {
 public:
  explicit Plan(Endpoint& endpoint) : endpoint_(endpoint) {}

  void add(const mc_op& op, const Region& region, const std::shared_ptr<RemoteMemory>& remote) {
    auto opcode = static_cast<mc_opcode>(op.opcode);
    if (Status allowed = remote->check(opcode, op.remote_offset, op.length); !allowed.ok())
      return endpoint_.complete(op, allowed);
    bool fits = batch_ && batch_->remote == remote && batch_->opcode == opcode &&
                batch_->local_on_device == region.memory.on_device &&
                batch_->local_pinned == region.memory.pinned && batch_->descs.size() < kMostInBatch &&
                batch_->bytes < kBatchBytes;
    if (!fits) {
      launch();
      batch_ = endpoint_.worker_->take();
      batch_->opcode = opcode;
      batch_->local_on_device = region.memory.on_device;
      batch_->local_pinned = region.memory.pinned;
      batch_->remote = remote;
    }
    batch_->descs.push_back(
        {region.memory.address + op.local_offset, remote->address + op.remote_offset, op.length});
    Completion done;
    done.cookie = op.cookie;
    done.opcode = opcode;
    done.bytes = op.length;
    batch_->done.push_back(std::move(done));
    batch_->bytes += op.length;
  }
  void launch() {
    if (batch_) endpoint_.worker_->launch(std::move(batch_));
    batch_.reset();
  }

 private:
  Endpoint& endpoint_;
  std::unique_ptr<Batch> batch_;
};

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  Plan plan(*this);
  Status status = begin_each(ops, count, accepted,
                             [&](const mc_op& op, const Names& names) { submit_one(op, names, plan); });
  plan.launch();
  return status;
}

void Endpoint::submit_one(const mc_op& op, const Names& names, Plan& plan) {
  if (auto open = std::static_pointer_cast<RemoteMemory>(asker_->opened(names.remote)))
    return plan.add(op, *names.region, open);
  auto later = [this, op, region = names.region](const std::shared_ptr<driver::Opened>& open,
                                                 const Status& why) {
    if (!open) return complete(op, why);
    Plan one(*this);
    one.add(op, *region, std::static_pointer_cast<RemoteMemory>(open));
    one.launch();
  };
  Status status;
  auto opened = asker_->use(names.remote, status, op.cookie, std::move(later));
  if (opened)
    plan.add(op, *names.region, std::static_pointer_cast<RemoteMemory>(opened));
  else if (status.code != MC_AGAIN)
    complete(op, status);
}

void Endpoint::cancel(uint64_t cookie) {
  Status why = failed(MC_CANCELLED, "the operation was cancelled");
  asker_->forget(cookie, why);
  worker_->cancel(cookie, why);
}

}  // namespace mooncake::ascend
