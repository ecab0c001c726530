// One operation of the engine, and the slices it is cut into.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

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
  size_t place = 0;        // in the peer's list of what has not completed

  std::atomic<bool> dropped{false};  // connections shall give its slices back at once
};

struct Slice {
  std::shared_ptr<Operation> operation;
  std::byte* local = nullptr;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
};

}  // namespace mooncake_tcp
