// One operation on its way, and the pieces that it is done in.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "mooncake_driver.h"
#include "region.hpp"

namespace mooncake::nvmeof {

struct Job;

struct Piece {
  Job* job = nullptr;
  std::byte* memory = nullptr;
  uint64_t offset = 0;  // on the device
  uint64_t length = 0;
  class Ring* ring = nullptr;  // that it went to; null: the pool
  Piece* next = nullptr;
};

struct Job {
  uint64_t cookie = 0;
  mc_handle connection = 0;
  mc_opcode opcode = MC_READ;
  uint64_t length = 0;
  std::shared_ptr<Region> local, remote;
  std::shared_ptr<Uses> uses;      // of an owner in this process
  std::shared_ptr<void> borrowed;  // of one in another

  // Those of a direct operation in the middle, and of what sticks out before and behind.
  Piece body, head, tail;
  uint32_t left = 0;                 // pieces; guarded by the mutex of Io, as is the rest
  Status status;                     // the first failure
  std::atomic<bool> stopped{false};  // cancelled or closed: what was not begun is not
  Job *previous = nullptr, *next = nullptr;
};

}  // namespace mooncake::nvmeof
