#include "endpoint.hpp"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "file.hpp"
#include "nvme_namespace.hpp"
#include "support/memory.hpp"
#include "support/table.hpp"

namespace mooncake::nvmeof {
namespace {

constexpr double kCloseLimitS = 30;
constexpr uint64_t kBandwidth = 3'000'000'000;  // of one drive; the engine measures what it gets
constexpr uint64_t kLatencyNs = 80'000;

bool inside(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

}  // namespace

Endpoint::Endpoint(const Options& options)
    : options_(options),
      generation_(fork_generation()),
      completions_(options.queue_depth),
      io_(std::make_shared<Io>(options_, completions_)) {}

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
  if (Status status = driver::make_address("nvmeof", address_); !status.ok()) return status;
  std::copy_n(address_.name, id_.size(), id_.begin());
  if (Status status = completions_.open(); !status.ok()) return status;
  if (Status status = io_->start(); !status.ok()) return status;
  if (Status status = start_peers(); !status.ok()) return status;
  announce(id_, owner_, io_);
  return {};
}

Status Endpoint::start_peers() {
  driver::GrantorHooks granting;
  granting.describe = [](driver::Session& peer, const driver::Owned& owned, uint32_t access,
                         driver::Offer& offer) { return lend(peer, owned, access, offer); };
  driver::AskerHooks asking;
  asking.open = [this](const std::shared_ptr<driver::Link>&, const driver::Message& grant,
                       std::vector<driver::Offer::Part> parts, std::shared_ptr<driver::Opened>& opened) {
    return borrow(options_, io_, grant, parts, opened);
  };
  asking.nudge = [this] { io_->reap(Io::Reaper::kOther); };
  double limit_s = options_.nvme.connect_timeout_s;
  bool far = !options_.host.empty();
  if (far) {
    if (Status status = driver::parse_host(options_.host, address_.host); !status.ok()) return status;
  }
  asking.over_tcp = far;
  grantor_ = std::make_unique<driver::Grantor>(loop_, driver::Grantor::Settings{limit_s, false, far},
                                               address_, std::move(granting));
  asker_ = std::make_unique<driver::Asker>(loop_, limit_s, address_, std::move(asking));
  if (Status status = loop_.start("mc-nvmeof-peers"); !status.ok()) return status;
  return grantor_->listen();
}

void Endpoint::close() {
  if (forked()) return;
  withdraw(id_);
  if (asker_) asker_->close();
  std::vector<std::shared_ptr<Uses>> uses;
  auto withdrawn = owner_->close(uses);
  (void)wait_for(uses, deadline_after(kCloseLimitS));
  for (const auto& region : withdrawn) {
    if (region->on_gpu) continue;
    forget_everywhere(*region->device);
    io_->forget(*region->device);  // what a ring still holds is given back some time after its end
    region->device->close();
  }
  io_->stop();
  for (const auto& region : withdrawn) {
    if (region->on_gpu) io_->forget(*region);  // nothing moves it any more
  }
  if (grantor_) grantor_->close();
  loop_.stop();
}

Status Endpoint::caps(mc_caps& caps) const {
  caps.flags = address_.port == 0 ? MC_CAP_SAME_HOST_ONLY : 0u;
  caps.memory_kinds = 1u << MC_DRAM | 1u << MC_FILE | 1u << MC_BLOCK;
  if (io_->moves_gpu_memory()) caps.memory_kinds |= 1u << MC_CUDA;
  caps.bandwidth_bytes_per_s = kBandwidth;
  caps.latency_ns = kLatencyNs;
  caps.max_op_bytes = options_.chunk_bytes;
  caps.in_flight_ops = options_.in_flight;
  caps.in_flight_bytes = options_.in_flight * options_.chunk_bytes;
  return {};
}

Status Endpoint::stats(mc_stats& stats) const {
  completions_.add_to(stats);
  stats.connections = asker_->open_connections();
  stats.refused = refused_.load(std::memory_order_relaxed) + grantor_->refused();
  return {};
}

// ---------------------------------------------------------------------------------------------- peers

Status Endpoint::export_address(void* blob, size_t* length) const {
  return driver::copy_out(&address_, sizeof address_, blob, length);
}

Status Endpoint::connect(const void* blob, size_t length, mc_handle* connection) {
  driver::Address theirs;
  if (Status status = driver::read_address(address_, blob, length, theirs); !status.ok()) return status;
  EndpointId id;
  std::copy_n(theirs.name, id.size(), id.begin());
  auto made = std::make_shared<Connection>();
  made->owner = find_owner(id);
  if (!made->owner) {
    if (Status status = asker_->reachable(theirs); !status.ok()) return status;
    made->far = asker_->connect(theirs);
  }
  return connections_.add(std::move(made), connection);
}

void Endpoint::disconnect(mc_handle connection) {
  std::shared_ptr<Connection> taken = connections_.take(connection);
  if (!taken) return;
  if (taken->far) asker_->disconnect(taken->far);
  io_->cancel([connection](const Job& job) { return job.connection == connection; }, MC_CLOSED);
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                            const void* blob, size_t length, mc_handle* remote) {
  std::shared_ptr<Connection> peer = connections_.get(connection);
  if (!peer) return failed(MC_INVALID, "no connection has this handle");
  uint8_t kind = MC_DRAM;
  if (length >= 1) std::memcpy(&kind, blob, 1);
  if (kind != MC_FILE && kind != MC_BLOCK)
    return failed(MC_UNSUPPORTED, "the nvmeof driver reaches files and block devices, not memory of a peer");
  auto made = std::make_shared<RemoteRegion>();
  made->owner = peer->owner;
  if (peer->far) made->far = asker_->import(peer->far, region_id, driver::key_from(key));
  made->id = region_id;
  made->key = driver::key_from(key);
  return remotes_.add(std::move(made), remote);
}

void Endpoint::release_key(mc_handle remote) { remotes_.take(remote); }

// ---------------------------------------------------------------------------------------------- regions

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  if (Status status = driver::check_version(memory); !status.ok()) return status;
  if (memory.length == 0) return failed(MC_INVALID, "the memory is empty");
  auto region = std::make_shared<Region>(memory.region_id, memory.key, memory.length);
  if (memory.kind == MC_DRAM || memory.kind == MC_CUDA) {
    Status status = driver::check_memory(memory, 1u << MC_DRAM | 1u << MC_CUDA, "");
    if (!status.ok()) return status;
    region->memory = reinterpret_cast<std::byte*>(memory.address);
    region->on_gpu = memory.kind == MC_CUDA;
  } else if (memory.kind == MC_FILE || memory.kind == MC_BLOCK) {
    if (memory.fd_offset + memory.length < memory.length)
      return failed(MC_INVALID, "the region wraps around the largest offset");
    if (Status status = open_device(memory, region->device); !status.ok()) return status;
    region->device_offset = memory.fd_offset;
  } else {
    return failed(MC_UNSUPPORTED, "the nvmeof driver takes main memory, GPU memory, files and block devices");
  }
  if (region->on_gpu) {
    if (Status status = io_->prepare(*region, memory.device); !status.ok()) return status;
  }
  Status status = publish(region, memory.key, registered);
  if (status.ok()) return {};
  if (region->on_gpu) io_->forget(*region);
  if (region->device) region->device->close();
  return status;
}

// Where peers of this process and of others find it: everywhere, or nowhere.
Status Endpoint::publish(const std::shared_ptr<Region>& region, const uint8_t* key, mc_handle* registered) {
  if (Status status = owner_->add(region); !status.ok()) return status;
  Status status;
  if (region->device) {
    region->lent = std::make_shared<Lent>(region, key);
    status = grantor_->add(region->lent);
  }
  if (status.ok()) status = regions_.add(region, registered);
  if (!status.ok()) owner_->remove(region->id);
  return status;
}

Status Endpoint::open_device(const mc_memory& memory, std::shared_ptr<Device>& device) const {
  constexpr size_t kWithLocation = offsetof(mc_memory, location) + sizeof memory.location;
  uint64_t bytes = memory.fd_offset + memory.length;
  if (memory.struct_size >= kWithLocation && memory.location != nullptr)
    return Namespace::open(memory.location, options_, device);
  std::shared_ptr<File> file;
  Status status = File::open(memory.fd, bytes, options_, file);
  device = std::move(file);
  return status;
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  owner_->remove(region->id);
  std::vector<std::shared_ptr<Uses>> uses;
  (void)region->revoke(nullptr, uses);
  if (Status status = wait_for(uses, deadline_ns); !status.ok()) return status;
  if (region->lent) {
    if (Status status = grantor_->withdraw(region->lent, deadline_ns); !status.ok()) return status;
  }
  io_->forget(*region);
  if (region->device) {
    forget_everywhere(*region->device);
    region->device->close();
  }
  regions_.take(registered);
  return {};
}

Status Endpoint::export_key(mc_handle registered, void* blob, size_t* length) const {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  uint8_t kind = region->device ? MC_FILE : MC_DRAM;
  return driver::copy_out(&kind, sizeof kind, blob, length);
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob,
                       size_t* length) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (Status status = region->grant(key, access); !status.ok()) return status;
  if (region->lent) {
    if (Status status = grantor_->grant(region->lent, key, access); !status.ok()) return status;
  }
  return export_key(registered, blob, length);
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  std::vector<std::shared_ptr<Uses>> uses;
  if (Status status = region->revoke(key, uses); !status.ok()) return status;
  if (region->lent) {
    if (Status status = grantor_->revoke(region->lent, key, deadline_ns); !status.ok()) return status;
  }
  return deadline_ns == 0 ? Status{} : wait_for(uses, deadline_ns);
}

Status Endpoint::wait_for(const std::vector<std::shared_ptr<Uses>>& uses, uint64_t deadline_ns) {
  auto pause = std::chrono::microseconds(20);
  for (;;) {
    reap_all();
    bool idle = std::all_of(uses.begin(), uses.end(), [](const auto& each) { return each->idle(); });
    if (idle) return {};
    if (now_ns() >= deadline_ns) return failed(MC_TIMEOUT, "operations were still in flight at the deadline");
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(2000));
  }
}

// ---------------------------------------------------------------------------------------------- operations

Status Endpoint::enter(const mc_op& op, RemoteRegion& remote, std::shared_ptr<Region>& region,
                       std::shared_ptr<Uses>& uses) {
  std::lock_guard lock(remote.mutex);
  if (remote.owner->closed()) return failed(MC_UNREACHABLE, "the peer's endpoint was closed");
  // Made for messages only: this is the way of every operation.
  auto label = [&] { return "region " + std::to_string(remote.id); };
  if (!remote.uses) {
    std::shared_ptr<Region> found = remote.owner->find(remote.id);
    if (!found || !found->device) return failed(MC_REFUSED, label() + " is not registered at the target");
    remote.uses = found->open(remote.key);
    if (!remote.uses) return failed(MC_REFUSED, "wrong or revoked access key for " + label());
    remote.region = std::move(found);
  }
  uint32_t needed = op.opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
  if ((remote.uses->access & needed) == 0)
    return failed(MC_REFUSED, "the key does not allow " +
                                  std::string(op.opcode == MC_READ ? "reading " : "writing to ") + label());
  if (op.opcode == MC_WRITE && !remote.region->device->writable())
    return failed(MC_REFUSED, remote.region->device->name() + " was opened for reading only");
  if (!inside(op.remote_offset, op.length, remote.region->length))
    return failed(MC_REFUSED, "the range is outside " + label() + ", which has " +
                                  std::to_string(remote.region->length) + " bytes");
  if (!remote.uses->enter())
    return failed(MC_REFUSED, label() + " was deregistered or its key revoked by its owner");
  region = remote.region;
  uses = remote.uses;
  return {};
}

Status Endpoint::prepare(const mc_op& op, Job*& out) {
  const std::shared_ptr<Region>* local = regions_.find(op.local);
  const std::shared_ptr<RemoteRegion>* remote = remotes_.find(op.remote);
  const std::shared_ptr<Connection>* connection = connections_.find(op.connection);
  if (local == nullptr || remote == nullptr || connection == nullptr)
    return failed(MC_INVALID, "the operation names a connection, memory or key that is not here");
  if ((*local)->memory == nullptr)
    return failed(MC_UNSUPPORTED,
                  "the nvmeof driver moves bytes between memory and files, not between files; "
                  "go through a buffer in memory");
  if (op.opcode != MC_READ && op.opcode != MC_WRITE) return failed(MC_INVALID, "there is no such opcode");
  if (!inside(op.local_offset, op.length, (*local)->length) || op.length == 0)
    return failed(MC_INVALID, "the range is outside the local memory");
  if ((*remote)->far) return enter_far(op, *local, *connection, **remote, out);
  std::shared_ptr<Region> region;
  std::shared_ptr<Uses> uses;
  Status status = enter(op, **remote, region, uses);
  if (status.code == MC_REFUSED) refused_.fetch_add(1, std::memory_order_relaxed);
  if (!status.ok()) return status;
  out = &fill(op, *local, std::move(region));
  out->uses = std::move(uses);
  return {};
}

Job& Endpoint::fill(const mc_op& op, const std::shared_ptr<Region>& local, std::shared_ptr<Region> remote) {
  Job& job = io_->new_job();
  job.cookie = op.cookie;
  job.connection = op.connection;
  job.opcode = static_cast<mc_opcode>(op.opcode);
  job.length = op.length;
  job.body.memory = local->memory + op.local_offset;
  job.body.offset = remote->device_offset + op.remote_offset;
  job.local = local;
  job.remote = std::move(remote);
  return job;
}

Status Endpoint::enter_far(const mc_op& op, const std::shared_ptr<Region>& local,
                           const std::shared_ptr<Connection>& connection, RemoteRegion& remote, Job*& job) {
  Status status;
  std::shared_ptr<driver::Opened> opened = asker_->opened(remote.far);
  if (!opened) {
    auto later = [this, op, local, connection](const std::shared_ptr<driver::Opened>& found,
                                               const Status& why) {
      Job* begun = nullptr;
      Status told = found ? begin_far(op, local, *connection, found, begun) : why;
      if (!told.ok()) return complete(op, told);
      std::vector<Job*> jobs{begun};
      io_->begin(jobs);
    };
    opened = asker_->use(remote.far, status, op.cookie, std::move(later));
  }
  return opened ? begin_far(op, local, *connection, opened, job) : status;
}

Status Endpoint::begin_far(const mc_op& op, const std::shared_ptr<Region>& local, Connection& connection,
                           const std::shared_ptr<driver::Opened>& opened, Job*& job) {
  Status status = opened->check(static_cast<mc_opcode>(op.opcode), op.remote_offset, op.length);
  if (!status.ok()) return status;
  const std::shared_ptr<Region>& region = static_cast<const Borrowed&>(*opened).region;
  if (op.opcode == MC_WRITE && !region->device->writable())
    return failed(MC_REFUSED, region->device->name() + " was opened for reading only");
  {
    std::lock_guard lock(connection.mutex);
    auto same = [&](const std::weak_ptr<Device>& known) { return known.lock() == region->device; };
    auto& known = connection.devices;
    if (std::none_of(known.begin(), known.end(), same)) known.push_back(region->device);
  }
  job = &fill(op, local, region);
  job->borrowed = opened;
  return {};
}

void Endpoint::complete(const mc_op& op, const Status& failure) {
  Completion completion;
  completion.cookie = op.cookie;
  completion.opcode = static_cast<mc_opcode>(op.opcode);
  completion.fail(failure);
  completions_.push({&completion, 1});
}

uint64_t Connection::late_ns() {
  if (owner) return owner->late_ns();
  std::lock_guard lock(mutex);
  std::erase_if(devices, [](const auto& known) { return known.expired(); });
  uint64_t longest = 0;
  for (const auto& known : devices) {
    if (auto device = known.lock()) longest = std::max(longest, device->late_ns());
  }
  return longest;
}

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  *accepted = completions_.reserve(count);
  thread_local std::vector<Job*> jobs;
  jobs.clear();
  std::vector<Completion> refused;
  for (size_t i = 0; i < *accepted; ++i) {
    Job* job = nullptr;
    Status status = prepare(ops[i], job);
    if (status.ok()) {
      jobs.push_back(job);
      continue;
    }
    if (status.code == MC_AGAIN) continue;  // it waits for its region's owner
    Completion& completion = refused.emplace_back();
    completion.cookie = ops[i].cookie;
    completion.opcode = static_cast<mc_opcode>(ops[i].opcode);
    completion.fail(status);
  }
  if (!jobs.empty()) io_->begin(jobs);
  if (!refused.empty()) completions_.push(refused);
  return *accepted < count ? failed(MC_AGAIN, "the queue is full; poll first") : Status{};
}

size_t Endpoint::poll(mc_completion* completions, size_t capacity) {
  io_->reap(Io::Reaper::kPoller);
  size_t count = completions_.poll(completions, capacity);
  if (completions_.any()) completions_.signal();  // the rest is for whoever comes next
  return count;
}

bool Endpoint::arm() { return io_->can_sleep() && completions_.arm(); }

// The files of this host need no fence. A target that was lost may apply for a while what it had taken.
Status Endpoint::late_writes(mc_handle connection, void* token, size_t* length) {
  std::shared_ptr<Connection> peer = connections_.get(connection);
  if (!peer) return failed(MC_INVALID, "no connection has this handle");
  uint64_t left = peer->late_ns();
  if (left != 0) return driver::copy_out(&left, sizeof left, token, length);
  *length = 0;
  return {};
}

// Nothing tells a target to forget what another association gave it: only time passes.
Status Endpoint::fence(const void* token, size_t length, uint64_t deadline_ns) {
  uint64_t left = 0;
  if (length != sizeof left) return failed(MC_INVALID, "this is no token of the nvmeof driver");
  std::memcpy(&left, token, sizeof left);
  uint64_t limit = static_cast<uint64_t>(options_.nvme.fence_s * 1e9);
  if (left > limit) return failed(MC_INVALID, "the token names a longer time than fence_s");
  uint64_t until = now_ns() + left;
  while (now_ns() < until) {
    if (now_ns() >= deadline_ns) return failed(MC_TIMEOUT, "the target may still apply writes of before");
    std::this_thread::sleep_for(std::chrono::nanoseconds(std::min(until, deadline_ns) - now_ns()));
  }
  return {};
}

void Endpoint::cancel(uint64_t cookie) {
  asker_->forget(cookie, failed(MC_CANCELLED, "the operation was cancelled"));
  io_->cancel([cookie](const Job& job) { return job.cookie == cookie; }, MC_CANCELLED);
}

}  // namespace mooncake::nvmeof
