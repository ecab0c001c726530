#include "endpoint.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>

#include "support/keys.hpp"
#include "support/table.hpp"

namespace mooncake::cxl {
namespace {

constexpr uint32_t kWireVersion = 1;
constexpr uint64_t kInFlightBytes = 64 << 20;
// What close() gives copies of peers that are under way. They see the end after a chunk.
constexpr double kLastCopiesS = 1.0;

Digest digest_of(const uint8_t* key) { return sha256(key, MC_KEY_BYTES); }

}  // namespace

Endpoint::Endpoint(const Options& options)
    : options_(options),
      generation_(fork_generation()),
      completions_(options.queue_depth),
      copies_({"mc-cxl-copy", options.workers, options.streaming_bytes, options.chunk_bytes}, completions_) {}

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
  if (Status status = completions_.open(); !status.ok()) return status;
  if (Status status = Pool::open(options_.pool, pool_); !status.ok()) return status;
  return copies_.start();
}

void Endpoint::close() {
  if (forked() || closed_.exchange(true)) return;
  copies_.end_all(failed(MC_CLOSED, "the endpoint was closed"));
  copies_.stop();
  std::vector<std::pair<std::shared_ptr<Region>, std::vector<RegionKey>>> ended;
  {
    std::lock_guard lock(known_mutex_);
    for (const auto& region : known_regions_) {
      ended.emplace_back(region, std::vector<RegionKey>{});
      (void)end_keys(*region, nullptr, &ended.back().second);
    }
    known_regions_.clear();
  }
  // Where a peer is stopped in mid-copy, the pool keeps the place until it has gone on.
  uint64_t deadline = deadline_after(kLastCopiesS);
  for (auto& [region, keys] : ended) {
    std::erase_if(keys, [&](const RegionKey& key) { return !pool_->wait_unused(key.index, deadline).ok(); });
    free_keys(*region, keys);
  }
}

Status Endpoint::caps(mc_caps& caps) const {
  caps.flags = pool_->hosts() == 1 ? MC_CAP_SAME_HOST_ONLY : 0u;
  caps.memory_kinds = 1u << MC_DRAM;
  caps.bandwidth_bytes_per_s = 8'000'000'000;  // one core's copy; the engine measures what it gets
  caps.latency_ns = 1'000;
  caps.inline_bytes = options_.inline_bytes;
  caps.in_flight_bytes = kInFlightBytes;
  caps.in_flight_ops = options_.queue_depth;
  return {};
}

Status Endpoint::stats(mc_stats& stats) const {
  completions_.add_to(stats);
  stats.connections = open_connections_.load(std::memory_order_relaxed);
  return {};
}

Status Endpoint::export_address(void* blob, size_t* length) const {
  Address own{kWireVersion, pool_->member(), {}, pool_->epoch()};
  std::memcpy(own.uuid, pool_->uuid(), sizeof own.uuid);
  return driver::copy_out(&own, sizeof own, blob, length);
}

Status Endpoint::connect(const void* address, size_t length, mc_handle* connection) {
  Address peer;
  if (length != sizeof peer)
    return failed(MC_UNREACHABLE, "the peer's address is not one of this cxl driver");
  std::memcpy(&peer, address, sizeof peer);
  if (peer.version != kWireVersion)
    return failed(MC_UNREACHABLE, "the peer's cxl driver speaks version " + std::to_string(peer.version));
  if (std::memcmp(peer.uuid, pool_->uuid(), sizeof peer.uuid) != 0 || !pool_->knows(peer.member)) {
    return failed(MC_UNREACHABLE, "the peer has another pool than " + options_.pool.backing.path +
                                      " of this engine (their uuids differ)");
  }
  auto made = std::make_shared<Connection>();
  made->id = driver::new_serial();
  made->member = peer.member;
  made->epoch = peer.epoch;
  if (Status status = connections_.add(std::move(made), connection); !status.ok()) return status;
  open_connections_.fetch_add(1, std::memory_order_relaxed);
  return {};
}

void Endpoint::disconnect(mc_handle connection) {
  std::shared_ptr<Connection> taken = connections_.take(connection);
  if (!taken) return;
  open_connections_.fetch_sub(1, std::memory_order_relaxed);
  copies_.end_connection(taken.get(), failed(MC_CLOSED, "the connection was closed"));
}

// ------------------------------------------------------------------------------------------- own memory

Status Endpoint::register_memory(const mc_memory& memory, mc_handle* registered) {
  if (memory.struct_size < offsetof(mc_memory, numa_node))
    return failed(MC_INVALID, "the memory description is of an unknown version");
  if (memory.kind != MC_DRAM) return failed(MC_UNSUPPORTED, "the cxl driver moves main memory only");
  if (memory.address == 0 || memory.length == 0 || memory.address + memory.length < memory.address)
    return failed(MC_INVALID, "the memory is empty or wraps around the address space");
  auto region = std::make_shared<Region>();
  region->id = memory.region_id;
  region->base = reinterpret_cast<std::byte*>(memory.address);
  region->length = memory.length;
  region->in_pool = pool_->locate(region->base, region->length, &region->offset);
  std::lock_guard lock(known_mutex_);
  for (const auto& other : known_regions_) {
    if (other->id == memory.region_id)
      return failed(MC_INVALID, "region id " + std::to_string(memory.region_id) + " is registered already");
  }
  if (region->in_pool) {
    Status status = add_key(*region, digest_of(memory.key), driver::kAllAccess, &region->own);
    if (!status.ok()) return status;
  }
  known_regions_.insert(region);
  return regions_.add(region, registered);
}

Status Endpoint::deregister_memory(mc_handle registered, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  std::vector<RegionKey> ended;
  (void)end_keys(*region, nullptr, &ended);
  for (const RegionKey& key : ended) {
    if (Status unused = pool_->wait_unused(key.index, deadline_ns); !unused.ok()) return unused;
  }
  {
    std::lock_guard lock(known_mutex_);
    known_regions_.erase(region);
  }
  if (!regions_.take(registered)) return {};  // another thread was first
  free_keys(*region, ended);
  return {};
}

Status Endpoint::add_key(Region& region, const Digest& key, uint32_t access, KeyBlob* blob) {
  RegionKey made{key, 0, 0};
  Status status =
      pool_->add_grant(region.id, region.offset, region.length, access, key, &made.index, &made.generation);
  if (!status.ok()) return status;
  *blob = blob_of(made);
  std::lock_guard lock(region.mutex);
  region.keys.push_back(made);
  return {};
}

KeyBlob Endpoint::blob_of(const RegionKey& key) const {
  return {kWireVersion, pool_->member(), key.index, 0, pool_->epoch(), key.generation};
}

Status Endpoint::end_keys(Region& region, const Digest* key, std::vector<RegionKey>* ended) {
  bool found = key == nullptr;
  std::lock_guard lock(region.mutex);
  for (RegionKey& known : region.keys) {
    if (key != nullptr && known.key != *key) continue;
    found = true;
    known.ended = true;
    pool_->end_grant(known.index);
    ended->push_back(known);
  }
  return found ? Status{} : failed(MC_INVALID, "the region never had this key");
}

void Endpoint::free_keys(Region& region, const std::vector<RegionKey>& ended) {
  std::lock_guard lock(region.mutex);
  std::erase_if(region.keys, [&](const RegionKey& known) {
    // The generation: another thread may have freed it, and the place be given again.
    bool over = std::any_of(ended.begin(), ended.end(), [&](const RegionKey& one) {
      return one.index == known.index && one.generation == known.generation;
    });
    if (over) pool_->free_grant(known.index);
    return over;
  });
}

Status Endpoint::export_key(mc_handle registered, void* blob, size_t* length) const {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (!region->in_pool) {
    *length = 0;  // who imports that is told that this driver does not reach it
    return {};
  }
  return driver::copy_out(&region->own, sizeof region->own, blob, length);
}

Status Endpoint::grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob,
                       size_t* length) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  if (!region->in_pool) return failed(MC_UNSUPPORTED, "the memory does not lie in the pool");
  if (access == 0 || (access & ~driver::kAllAccess) != 0)
    return failed(MC_INVALID, "access " + std::to_string(access) + " is not made of mc_access bits");
  KeyBlob made;
  if (Status status = add_key(*region, digest_of(key), access, &made); !status.ok()) return status;
  return driver::copy_out(&made, sizeof made, blob, length);
}

Status Endpoint::revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  std::shared_ptr<Region> region = regions_.get(registered);
  if (!region) return failed(MC_INVALID, "no memory is registered under this handle");
  std::vector<RegionKey> ended;
  Digest digest = key == nullptr ? Digest{} : digest_of(key);
  if (Status status = end_keys(*region, key == nullptr ? nullptr : &digest, &ended); !status.ok())
    return status;
  if (deadline_ns == 0) return {};
  for (const RegionKey& one : ended) {
    if (Status unused = pool_->wait_unused(one.index, deadline_ns); !unused.ok()) return unused;
  }
  // All keys end with the memory, and what was said about them is asked for again then.
  if (key != nullptr) free_keys(*region, ended);
  return {};
}

// ------------------------------------------------------------------------------------------ peers' memory

Status Endpoint::import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                            const void* blob, size_t length, mc_handle* remote) {
  std::shared_ptr<Connection> peer = connections_.get(connection);
  if (!peer) return failed(MC_INVALID, "no connection has this handle");
  if (length == 0) {
    return failed(MC_UNSUPPORTED,
                  "the region does not lie in the pool; allocate it there, or take another "
                  "driver for it");
  }
  KeyBlob known{};
  // A malformed one names no grant, and is refused when it is used.
  known.member = ~0u;
  if (length == sizeof known) std::memcpy(&known, blob, sizeof known);
  if (known.version != kWireVersion || known.member != peer->member || known.epoch != peer->epoch)
    known.member = ~0u;
  return remotes_.add(std::make_shared<RemoteRegion>(*pool_, *peer, known, region_id, digest_of(key)),
                      remote);
}

void Endpoint::cancel(uint64_t cookie) {
  copies_.end_cookie(cookie, failed(MC_CANCELLED, "the operation was cancelled"));
}

}  // namespace mooncake::cxl
