// What moves together: operations of one peer, direction and kind of memory.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "acl.hpp"
#include "mooncake_driver.h"
#include "support/chain.hpp"
#include "support/completions.hpp"
#include "support/peers/asker.hpp"

namespace mooncake::ascend {

using driver::Completion;
using driver::Completions;

// A peer's region, as its owner described it.
struct RemoteMemory : driver::Opened {
  ~RemoteMemory() override;
  uint64_t address = 0;
  bool on_device = false;
  bool pinned = false;                   // main memory of aclrtMallocHost
  std::string engine;                    // of the owner; empty: this process
  uint64_t generation = 0;               // of the owner's registrations, when this one was there
  std::shared_ptr<class Worker> worker;  // is told when nobody uses the region any more
};

struct Batch {
  // As new, with the room that it has.
  void clear();

  std::unique_ptr<Batch> next;  // of a chain
  mc_opcode opcode = MC_READ;
  bool local_on_device = false, local_pinned = false;
  std::shared_ptr<RemoteMemory> remote;
  std::vector<mc_ascend_desc> descs;
  std::vector<Completion> done;
  uint64_t bytes = 0;

  // The worker's: of the transfer that HIXL has begun, and what the batch ends with when that is over.
  void* request = nullptr;
  uint64_t deadline_ns = 0;
  Status failure;
};
using Batches = driver::Chain<Batch>;
using Finish = std::function<void(std::unique_ptr<Batch>, Status)>;

}  // namespace mooncake::ascend
