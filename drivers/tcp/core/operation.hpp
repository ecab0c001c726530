// One operation of the engine, and the slices it is cut into.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "region.hpp"
#include "status.hpp"
#include "wire.hpp"

namespace mooncake_tcp {

// A peer's region as a descriptor names it.
struct RemoteRegion {
  mc_handle connection = 0;
  uint64_t id = 0;
  uint64_t length = 0;
  Key key{};
  // Set once the target refused for a reason that stays; what still waits for it is then not even sent.
  mutable std::atomic<uint16_t> refusal{0};
};

struct Operation {
  uint64_t cookie = 0;
  mc_opcode opcode = MC_READ;
  RegionUse use;  // of the local memory, until the completion is out
  std::byte* local = nullptr;
  std::shared_ptr<const RemoteRegion> remote;
  uint64_t remote_offset = 0;
  uint64_t length = 0;

  // Guarded by the peer's mutex.
  uint64_t next = 0;       // first byte not yet given to a connection; `length` when no more shall be
  uint64_t moved = 0;      // bytes of slices that succeeded
  uint32_t in_flight = 0;  // slices that connections have
  Status failure;          // the first one
  uint64_t order = 0;      // counts the operations of the peer
  bool bulk = false;       // for the connections that workers own
  // Place among the operations that have not completed, see LiveOperations.
  std::shared_ptr<Operation> self;
  Operation* next_live = nullptr;
  Operation** link = nullptr;

  std::atomic<bool> dropped{false};  // connections shall give its slices back at once
};

// The operations of a peer that have not completed, by cookie. Adding and removing allocate nothing.
class LiveOperations {
 public:
  LiveOperations() : buckets_(kBuckets, nullptr) {}
  ~LiveOperations() {
    for (Operation*& bucket : buckets_) {
      while (bucket != nullptr) remove(*bucket);
    }
  }
  LiveOperations(const LiveOperations&) = delete;
  LiveOperations& operator=(const LiveOperations&) = delete;

  void add(const std::shared_ptr<Operation>& operation) {
    Operation*& bucket = bucket_of(operation->cookie);
    operation->self = operation;
    operation->next_live = bucket;
    operation->link = &bucket;
    if (bucket != nullptr) bucket->link = &operation->next_live;
    bucket = operation.get();
  }
  // Returns what kept it alive.
  std::shared_ptr<Operation> remove(Operation& operation) {
    *operation.link = operation.next_live;
    if (operation.next_live != nullptr) operation.next_live->link = operation.link;
    return std::move(operation.self);
  }
  std::vector<std::shared_ptr<Operation>> find(uint64_t cookie) {
    std::vector<std::shared_ptr<Operation>> found;
    for (Operation* at = bucket_of(cookie); at != nullptr; at = at->next_live) {
      if (at->cookie == cookie) found.push_back(at->self);
    }
    return found;
  }

 private:
  static constexpr size_t kBuckets = 1024;
  // Cookies are mostly addresses or counters: the multiplication spreads either over the upper bits.
  Operation*& bucket_of(uint64_t cookie) { return buckets_[(cookie * 0x9E3779B97F4A7C15u) >> 54]; }

  std::vector<Operation*> buckets_;
};

struct Slice {
  std::shared_ptr<Operation> operation;
  std::byte* local = nullptr;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
};

}  // namespace mooncake_tcp
