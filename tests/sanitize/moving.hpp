// What initiators do in these programs.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "driver_endpoint.hpp"

namespace sanitized {

constexpr size_t kCell = 8 << 10;
constexpr size_t kCells = 32;
constexpr size_t kPart = kCell * kCells;  // of each thread that moves bytes
constexpr double kOperationS = 60;        // by when an operation must have ended, however slow the machine

// From local memory of an endpoint to a region of its peer, and back.
struct Route {
  Endpoint* endpoint;
  mc_handle connection, local, remote;

  mc_op op(mc_opcode opcode, uint64_t local_offset, uint64_t remote_offset, uint64_t length) const;
  // One operation on its own; what became of it.
  mc_status try_one(const mc_op& op) const;
};

void set(Operations& operations, size_t index, const mc_op& op);

struct Counts {
  std::atomic<size_t> moved{0}, cancelled{0}, refused{0};
};

// Batches of disjoint blocks in the part of this number of both memories; some are cancelled on their way.
void move_batches(const Route& route, size_t part, uint64_t until_ns, Counts& counts);

// The first part goes there and comes back as the second of the local memory.
void check_bytes(const Route& route, Pages& local);

}  // namespace sanitized
