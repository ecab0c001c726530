// The memory of this process: as the local side of operations, and as the target of peers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "mooncake_driver.h"
#include "registration.hpp"
#include "support/keys.hpp"

namespace mooncake::verbs {

using driver::Key;

// A peer's key and what it opens. Each has a registration of its own, with the rights of the key: to revoke
// it is to end that registration, which the device enforces.
struct Grant {
  Key key;
  uint32_t access;
  bool revoked;
  std::shared_ptr<Registration> opened;            // null for the region's own key until it is exported
  std::shared_ptr<const std::atomic<bool>> ended;  // of what was opened, once it is revoked
};

struct Region {
  Region() = default;
  Region(const Region&) = delete;
  Region& operator=(const Region&) = delete;
  ~Region();

  uint64_t id = 0;
  MemoryRange range;                    // its descriptor ends with this
  std::shared_ptr<Registration> local;  // no rights for peers
  std::atomic<uint32_t> users{0};       // operations of this side
  bool withdrawn = false;               // under the mutex of Regions, as the next
  std::vector<Grant> grants;            // the first is the region's own key
};

// What a key opens, for the answer to a peer.
struct Opened {
  uint32_t access = 0;
  std::shared_ptr<Registration> registration;
};

// Thread-safe.
class Regions {
 public:
  Regions(std::unique_ptr<Device>& device, const Options& options) : device_(device), options_(options) {}

  Status add(const mc_memory& memory, std::shared_ptr<Region>& region);
  // Makes the region's own key open it. Memory that no peer is told of is not registered for peers.
  Status expose(Region& region);
  Status grant(Region& region, const uint8_t* key, uint32_t access);
  // After MC_OK the device refuses what comes under the key (null: under each). Beside the device's own time
  // it waits for who is telling a peer of the key: until the deadline (MC_TIMEOUT), or with 0 not at all.
  Status revoke(Region& region, const uint8_t* key, uint64_t deadline_ns);
  // Revokes every key, and waits for the operations of this side.
  Status remove(Region& region, uint64_t deadline_ns);
  // MC_REFUSED says why a peer gets nothing.
  Status open(uint64_t id, const uint8_t* key, Opened& opened);
  // An operation of this side is over: someone may wait for the last one.
  void release(Region& region) {
    if (region.users.fetch_sub(1, std::memory_order_acq_rel) == 1 && waiting_ != 0) notify();
  }

 private:
  // The registration of a region that contains the range; null: there is none.
  std::shared_ptr<Registration> shared_with(const MemoryRange& range);
  Status register_for(const Region& region, uint32_t access, std::shared_ptr<Registration>& made);
  void notify();

  std::unique_ptr<Device>& device_;
  const Options& options_;
  std::mutex mutex_;
  std::condition_variable unused_;
  std::atomic<uint32_t> waiting_{0};
  std::vector<std::weak_ptr<Region>> all_;
};

}  // namespace mooncake::verbs
