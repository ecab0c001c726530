// One instance of the driver: everything behind an endpoint handle.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "job.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "pool.hpp"
#include "region.hpp"
#include "remote.hpp"
#include "support/completions.hpp"
#include "support/handles.hpp"
#include "support/operands.hpp"

namespace mooncake::cxl {

using driver::Completion;
using driver::Completions;
using driver::HandleTable;

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  explicit Endpoint(const Options& options);
  ~Endpoint() { close(); }
  void close();
  // Threads do not survive fork(): a child must not touch the parent's endpoint.
  bool forked() const { return fork_generation() != generation_; }

  Status caps(mc_caps& caps) const;
  Status stats(mc_stats& stats) const;
  Status export_address(void* blob, size_t* length) const;
  Status connect(const void* address, size_t length, mc_handle* connection);
  void disconnect(mc_handle connection);
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status export_key(mc_handle registered, void* blob, size_t* length) const;
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t region_length,
                    const void* blob, size_t length, mc_handle* remote);
  void release_key(mc_handle remote) { remotes_.take(remote); }
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob, size_t* length);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  size_t poll(mc_completion* completions, size_t capacity) { return copies_.poll(completions, capacity); }
  int event_fd() const { return completions_.event_fd(); }
  bool arm() { return copies_.arm(); }
  void cancel(uint64_t cookie);

 private:
  using Operands = driver::Operands<Connection, Region, RemoteRegion>;
  // Small operations of one submit() that follow one another and name the same remote region share a visit.
  class Visit;

  Status start();
  // Each returns how many completions it wrote to `finished`, which has room for one of each operation.
  void run(const std::shared_ptr<Job>& job);
  Status add_key(Region& region, const Digest& key, uint32_t access, KeyBlob* blob);
  KeyBlob blob_of(const RegionKey& key) const;
  // Ends the region's grants under `key`, all of them when null; which they were.
  Status end_keys(Region& region, const Digest* key, std::vector<RegionKey>* ended);
  // Their places may be given again, each once, whoever comes first: wait_unused() was good for them.
  void free_keys(Region& region, const std::vector<RegionKey>& ended);

  const Options options_;
  const uint32_t generation_;
  std::shared_ptr<Pool> pool_;
  Completions completions_;
  driver::CopyPool copies_;
  std::atomic<uint32_t> open_connections_{0};
  std::atomic<bool> closed_{false};
  HandleTable<Connection> connections_;
  HandleTable<Region> regions_;
  HandleTable<RemoteRegion> remotes_;
  std::mutex known_mutex_;
  std::unordered_set<std::shared_ptr<Region>> known_regions_;  // to end what close() finds
};

}  // namespace mooncake::cxl
