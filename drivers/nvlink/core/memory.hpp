// Memory that this driver moves bytes from and to: registered here, or a peer's that was granted.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>

#include "devices.hpp"
#include "mooncake_driver.h"
#include "pins.hpp"
#include "support/os.hpp"
#include "support/peers/asker.hpp"
#include "support/peers/grantor.hpp"

namespace mooncake::nvlink {

using driver::UniqueFd;

// A range of bytes that CUDA can copy, in its one address space of main and GPU memory.
struct Place {
  uint64_t address = 0;
  int device = kHost;              // kUnknown: of a GPU that this process does not see
  std::shared_ptr<const Pin> pin;  // of main memory
};

struct Region : driver::Owned {
  using Owned::Owned;
  // MC_TIMEOUT while this side copies a piece of it for a peer, which may be gone itself.
  Status let_go(uint64_t deadline_ns);

  Place place;
  std::atomic<uint32_t> pieces{0};               // that are copied now
  std::shared_ptr<const UniqueFd> fd;            // main memory: what peers may map
  std::shared_ptr<const UniqueFd> read_only_fd;  // the same, for peers that only read
  uint64_t fd_offset = 0;
};

// Registers: checks with CUDA that the memory is what the engine says, and pins main memory.
Status make_region(Devices& devices, const mc_memory& memory, std::shared_ptr<Region>& region);

// How a peer gets at a region.
enum class Way : uint32_t {
  kDirect = 1,  // same process: by its address
  kFile,        // main memory: its memfd is mapped
  kIpc,         // cuMemAlloc memory: a legacy IPC handle of the allocation
  kMapped,      // VMM memory: its allocations are mapped, by descriptors or fabric handles
  kStaged,      // through a buffer that both map; the owner copies its side
};

// What the owner says of a region, in the body of a grant.
struct GrantBody {
  Way way;
  uint32_t parts;
  uint64_t address;       // kDirect
  uint64_t skip;          // from the start of what is mapped to the region
  uint64_t mapped_bytes;  // kIpc: of the allocation; kMapped: of all parts
  uint64_t identity;      // of the allocation within the owner's process
  int32_t device;
  uint8_t uuid[16];
  uint8_t handle[64];  // kIpc
};
// A part of VMM memory.
struct PartBody {
  uint64_t size;
  uint32_t handle_type;
  uint32_t reserved;
  uint8_t handle[64];  // of a fabric handle; descriptors come along with the message
};

// At the owner: fills the offer for a peer.
Status describe(Devices& devices, const driver::Session& peer, const Region& region, uint32_t access,
                driver::Offer& offer);

// A peer's memory in this process.
struct RemoteMemory : driver::Opened {
  ~RemoteMemory() override;
  Way way = Way::kStaged;
  Place place;              // of all ways but kStaged
  std::set<int> reachable;  // the GPUs that may copy it; empty: all
  std::shared_ptr<void> mapping;
};

// At the initiator. What cannot be mapped is staged, where the peer is at the same host.
Status open_memory(Devices& devices, const std::shared_ptr<driver::Link>& link, const driver::Message& grant,
                   std::vector<driver::Offer::Part> parts, std::shared_ptr<RemoteMemory>& memory);

}  // namespace mooncake::nvlink
