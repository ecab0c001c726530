#include "endpoint.hpp"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <mutex>

namespace mooncake_tcp {

namespace {

// For ranking against other drivers: what one pair of sockets on a 25 Gb/s network does.
constexpr uint64_t kBandwidth = 2'500'000'000;
constexpr uint64_t kLatencyNs = 50'000;
// What keeps the connections of one peer busy, with some in reserve.
constexpr uint64_t kInFlightBytes = 32u << 20;
constexpr uint64_t kInFlightOps = 4096;
// How long a peer may take to accept the rest of an answer from a region that is being closed.
constexpr uint64_t kGraceNs = 1'000'000'000;
// Beyond this the clock's signed count would wrap into the past.
constexpr uint64_t kFarthestNs = uint64_t{1} << 62;

std::string range_text(uint64_t offset, uint64_t length) {
  return std::to_string(length) + " bytes at " + std::to_string(offset);
}

}  // namespace

Status Endpoint::open(const Options& options, std::shared_ptr<Endpoint>* endpoint) {
  std::shared_ptr<Endpoint> opened(new Endpoint);
  opened->shared_.options = options;
  Status status = opened->begin();
  if (status.ok()) *endpoint = std::move(opened);
  return status;
}

Status Endpoint::begin() {
  Status queue = shared_.completions.open();
  if (!queue.ok()) return queue;
  Status polled = shared_.poller.open();
  if (!polled.ok()) return polled;
  if (shared_.poller.watch(shared_.completions.event_fd(), EPOLLIN, nullptr, nullptr) == 0) {
    return os_error("cannot watch for completions", errno);
  }
  if (getrandom(nonce_.data(), nonce_.size(), 0) != static_cast<ssize_t>(nonce_.size())) {
    return os_error("cannot get random bytes", errno);
  }
  Status secured = load_tls(&shared_.options);
  if (!secured.ok()) return secured;
  auto& workers = shared_.workers;
  for (size_t i = 0; i < shared_.options.workers; ++i) workers.push_back(std::make_unique<Worker>());
  listener_ =
      std::make_unique<Listener>(workers, shared_.options, nonce_, targets_, shared_.counters, sessions_);
  Status listening = listener_->open();
  if (!listening.ok()) return listening;
  shared_.own_hosts = interface_addresses();
  shared_.source = listener_->bound();
  EndpointAddress address{nonce_, {listener_->bound()}, shared_.options.tls != nullptr};
  if (!shared_.options.advertise_host.empty()) {
    Status resolved = resolve(shared_.options.advertise_host, &address.hosts[0]);
    if (!resolved.ok()) return resolved;
    address.hosts[0].set_port(listener_->bound().port());
  } else if (listener_->bound().is_wildcard()) {
    address.hosts.clear();
    for (SocketAddress host : shared_.own_hosts) {
      // An IPv6 wildcard takes IPv4 too, unless the system says otherwise; a host that does not answer is
      // passed over.
      if (host.family() != listener_->bound().family() && listener_->bound().family() == AF_INET) continue;
      host.set_port(listener_->bound().port());
      address.hosts.push_back(host);
    }
  }
  address_blob_ = encode_address(address);
  for (size_t i = 0; i < workers.size(); ++i) {
    Status started = workers[i]->start("mc-tcp-" + std::to_string(i));
    if (!started.ok()) return started;
  }
  workers[0]->post([this] { listener_->begin(); });
  return {};
}

void Endpoint::close() {
  for (auto& worker : shared_.workers) worker->stop();
}

void Endpoint::caps(mc_caps* caps) const {
  mc_caps known{};
  known.struct_size = std::min<uint32_t>(caps->struct_size, sizeof(known));
  known.memory_kinds = 1u << MC_DRAM;
  known.bandwidth_bytes_per_s = kBandwidth;
  known.latency_ns = kLatencyNs;
  known.alignment = 1;
  known.inline_bytes = 0;
  known.in_flight_bytes = kInFlightBytes;
  known.in_flight_ops = kInFlightOps;
  memcpy(caps, &known, known.struct_size);
}

void Endpoint::stats(mc_stats* stats) const {
  mc_stats known{};
  known.struct_size = std::min<uint32_t>(stats->struct_size, sizeof(known));
  known.connections = shared_.counters.connections;
  known.ops = shared_.counters.ops;
  known.bytes_read = shared_.counters.bytes_read;
  known.bytes_written = shared_.counters.bytes_written;
  known.errors = shared_.counters.errors;
  known.refused = shared_.counters.refused;
  memcpy(stats, &known, known.struct_size);
}

// ---- peers

Status Endpoint::connect(const void* blob, size_t length, mc_handle* connection) {
  EndpointAddress address;
  Status status = decode_address(blob, length, &address);
  if (!status.ok()) return status;
  if (address.encrypted != (shared_.options.tls != nullptr)) {
    return {MC_UNSUPPORTED, std::string("tcp is encrypted at ") +
                                (address.encrypted ? "the peer only" : "this end only") +
                                "; set TlsConfig.data for both or for neither"};
  }
  uint64_t session = 0;
  while (session == 0) {  // 0 means none
    if (getrandom(&session, sizeof(session), 0) < 0 && errno != EINTR) {
      return os_error("cannot get random bytes", errno);
    }
  }
  size_t first_worker = next_worker_.fetch_add(shared_.options.connections);
  *connection = peers_.add(Peer::make(std::move(address), session, shared_, first_worker));
  return {};
}

void Endpoint::disconnect(mc_handle connection) {
  if (auto peer = peers_.remove(connection)) peer->disconnect();
}

// ---- memory

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  constexpr size_t kNeeded = offsetof(mc_memory, key) + MC_KEY_BYTES;
  if (memory.struct_size < kNeeded) return {MC_INVALID, "the memory description is too short"};
  if (memory.kind != MC_DRAM) return {MC_UNSUPPORTED, "tcp moves only host memory"};
  if (memory.address == 0 || memory.length == 0 || memory.address + memory.length < memory.address) {
    return {MC_INVALID, "there is no memory of " + range_text(memory.address, memory.length)};
  }
  Key key;
  memcpy(key.data(), memory.key, key.size());
  auto region = std::make_shared<Region>(memory.region_id, memory.address, memory.length, key);
  if (!targets_.add(region)) {
    return {MC_INVALID, "region id " + std::to_string(memory.region_id) + " is registered already"};
  }
  *registered = regions_.add(std::move(region));
  return {};
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.find(registered);
  if (!region) return {MC_INVALID, "there is no such registration"};
  region->close();
  targets_.remove(region->id());
  std::string users = end_revoked_uses(region, deadline_ns);
  if (!users.empty()) return {MC_TIMEOUT, users + " still use the memory; it stays revoked"};
  regions_.remove(registered);
  return {};
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access) {
  std::shared_ptr<Region> region = regions_.find(registered);
  if (!region) return {MC_INVALID, "there is no such registration"};
  constexpr uint32_t kAll = MC_ACCESS_READ | MC_ACCESS_WRITE;
  if (key == nullptr || access == 0 || (access & ~kAll) != 0) {
    return {MC_INVALID, "a grant needs a key, and access to read, to write, or both"};
  }
  Key copy;
  memcpy(copy.data(), key, copy.size());
  if (!region->add_key(copy, access)) return {MC_INVALID, "the memory has this key already"};
  return {};
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.find(registered);
  if (!region) return {MC_INVALID, "there is no such registration"};
  if (key == nullptr) {
    region->revoke_keys();
  } else {
    Key copy;
    memcpy(copy.data(), key, copy.size());
    if (!region->revoke_key(copy)) return {MC_INVALID, "the memory was never granted this key"};
  }
  std::string users = end_revoked_uses(region, deadline_ns);
  if (!users.empty() && deadline_ns != 0) {
    return {MC_TIMEOUT, users + " still move bytes of the memory; the key stays revoked"};
  }
  return {};
}

// Stops what revoked keys began; whose operations go on at the deadline, empty when none do.
std::string Endpoint::end_revoked_uses(const std::shared_ptr<Region>& region, uint64_t deadline_ns) {
  for (auto& worker : shared_.workers) {
    worker->post([worker = worker.get()] { worker->each([](Watched& watched) { watched.on_revoked(); }); });
  }
  uint64_t now = now_ns();
  uint64_t patience = deadline_ns > now ? std::min((deadline_ns - now) / 2, kGraceNs) : 0;
  if (region->wait_unused(now + patience)) return {};
  if (deadline_ns == 0) return region->users();
  for (auto& worker : shared_.workers) {
    worker->post([worker = worker.get(), region] {
      worker->each([&region](Watched& watched) { watched.on_abort(*region); });
    });
  }
  return region->wait_unused(deadline_ns) ? std::string() : region->users();
}

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key,
                            uint64_t region_length, mc_handle* remote) {
  if (key == nullptr) return {MC_INVALID, "the access key is missing"};
  if (!peers_.find(connection)) return {MC_INVALID, "there is no such connection"};
  auto region = std::make_shared<RemoteRegion>();
  region->connection = connection;
  region->id = region_id;
  region->length = region_length;
  memcpy(region->key.data(), key, region->key.size());
  *remote = remotes_.add(std::move(region));
  return {};
}

// ---- operations

size_t Endpoint::poll(mc_completion* completions, size_t capacity) {
  if (shared_.completions.empty()) shared_.poller.progress();
  return shared_.completions.poll(completions, capacity);
}

bool Endpoint::arm() {
  if (!shared_.completions.empty()) return false;
  // While bytes come there are more in a moment, sooner than a sleeper wakes.
  if (shared_.poller.progress()) return false;
  return shared_.completions.arm();
}

struct Endpoint::Lookup {
  explicit Lookup(const Endpoint& endpoint)
      : peers(endpoint.peers_), regions(endpoint.regions_), remotes(endpoint.remotes_) {}
  CachedLookup<Peer> peers;
  CachedLookup<Region> regions;
  CachedLookup<RemoteRegion> remotes;
};

// Operations of one submit() share their memory, which goes when the last of them does.
class Endpoint::OperationBlock {
 public:
  explicit OperationBlock(size_t count) : left_(count) {}
  std::shared_ptr<Operation> next() {
    if (at_ == size_) {
      size_ = std::clamp<size_t>(left_, 1, kMost);
      left_ -= std::min(size_, left_);
      block_ = std::make_shared<std::vector<Operation>>(size_);
      at_ = 0;
    }
    return std::shared_ptr<Operation>(block_, &(*block_)[at_++]);
  }

 private:
  static constexpr size_t kMost = 32;
  size_t left_;
  size_t at_ = 0;
  size_t size_ = 0;
  std::shared_ptr<std::vector<Operation>> block_;
};

struct Endpoint::Request {
  std::shared_ptr<Peer> peer;
  std::shared_ptr<Operation> operation;
};

Status Endpoint::prepare(const mc_op& op, Lookup* lookup, OperationBlock* block, Request* request) {
  if (op.opcode != MC_READ && op.opcode != MC_WRITE) return {MC_UNSUPPORTED, "tcp only reads and writes"};
  if (op.flags != 0 || op.length == 0) return {MC_INVALID, "flags must be 0 and length positive"};
  const auto& peer = lookup->peers.find(op.connection);
  const auto& local = lookup->regions.find(op.local);
  const auto& remote = lookup->remotes.find(op.remote);
  if (!peer || !local || !remote || remote->connection != op.connection) {
    return {MC_INVALID, "the operation names a connection or memory that is not there (any more)"};
  }
  if (!inside(op.local_offset, op.length, local->length())) {
    return {MC_INVALID, range_text(op.local_offset, op.length) + " are outside the local memory"};
  }
  if (!inside(op.remote_offset, op.length, remote->length)) {
    return {MC_INVALID, range_text(op.remote_offset, op.length) + " are outside the remote memory"};
  }
  std::shared_ptr<Operation> operation = block->next();
  operation->cookie = op.cookie;
  operation->opcode = static_cast<mc_opcode>(op.opcode);
  operation->use = RegionUse::of(local);
  if (!operation->use) return {MC_INVALID, "the local memory is being deregistered"};
  operation->local = local->at(op.local_offset);
  operation->remote = remote;
  operation->remote_offset = op.remote_offset;
  operation->length = op.length;
  *request = {peer, std::move(operation)};
  return {};
}

Status Endpoint::submit(const mc_op* ops, size_t count, size_t* accepted) {
  if (ops == nullptr && count != 0) return {MC_INVALID, "the operation list is null"};
  Lookup lookup(*this);
  size_t room = shared_.completions.reserve(count);
  OperationBlock block(room);
  size_t taken = 0;
  Status invalid;
  while (taken < room && invalid.ok()) {
    // One run of operations for the same peer after the other: most batches are one run.
    std::shared_ptr<Peer> peer;
    std::vector<std::shared_ptr<Operation>> run;
    while (taken + run.size() < room) {
      Request request;
      invalid = prepare(ops[taken + run.size()], &lookup, &block, &request);
      if (!invalid.ok() || (peer && request.peer != peer)) break;
      peer = std::move(request.peer);
      run.push_back(std::move(request.operation));
    }
    if (run.empty()) break;
    taken += run.size();
    peer->submit(std::move(run));
  }
  shared_.completions.give_back(room - taken);
  if (taken == 0 && !invalid.ok()) return invalid;
  *accepted = taken;
  return {taken == count ? MC_OK : MC_AGAIN, {}};
}

Status Endpoint::cancel(uint64_t cookie) {
  for (const auto& peer : peers_.all()) peer->cancel(cookie);
  return {};
}

// ---- late writes

Status Endpoint::late_writes(mc_handle connection, std::string* token) {
  std::shared_ptr<Peer> peer = peers_.find(connection);
  if (!peer) return {MC_INVALID, "there is no such connection"};
  // The answers to what was dropped may be there, and nobody polls where nothing else is under way.
  if (peer->has_late_writes()) shared_.poller.progress();
  *token = encode_fence(peer->late_writes());
  return {};
}

// Each of the connections is closed by its own worker, see Incoming::end_soon(): so nothing of it is being
// applied then, and what its socket holds is gone. One whose hello comes only now has carried no write yet,
// because initiators wait for the welcome.
Status Endpoint::fence(const void* bytes, size_t length, uint64_t deadline_ns) {
  FenceToken token;
  if (!decode_fence(bytes, length, &token)) return {MC_INVALID, "these bytes are no token of the tcp driver"};
  struct Closing {
    std::mutex mutex;
    std::condition_variable ended;
    size_t left;
  };
  auto connections = sessions_.named(token);
  auto closing = std::make_shared<Closing>();
  closing->left = connections.size();
  for (const auto& connection : connections) {
    connection->end_soon([closing] {
      std::lock_guard lock(closing->mutex);
      --closing->left;
      closing->ended.notify_all();
    });
  }
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC on Linux
  Clock::time_point until(std::chrono::nanoseconds(std::min(deadline_ns, kFarthestNs)));
  std::unique_lock lock(closing->mutex);
  if (closing->ended.wait_until(lock, until, [&] { return closing->left == 0; })) return {};
  return {MC_TIMEOUT, std::to_string(closing->left) + " connections are not closed yet"};
}

}  // namespace mooncake_tcp
