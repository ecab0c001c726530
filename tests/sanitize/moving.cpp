#include "moving.hpp"

#include <random>

namespace sanitized {

mc_op Route::op(mc_opcode opcode, uint64_t local_offset, uint64_t remote_offset, uint64_t length) const {
  mc_op op{};
  op.opcode = opcode;
  op.connection = connection;
  op.local = local;
  op.remote = remote;
  op.local_offset = local_offset;
  op.remote_offset = remote_offset;
  op.length = length;
  return op;
}

mc_status Route::try_one(const mc_op& op) const {
  Operations one(1);
  set(one, 0, op);
  endpoint->submit(one);
  require(one.wait(kOperationS), "an operation does not end");
  return static_cast<mc_status>(one.slots[0].result.status);
}

void set(Operations& operations, size_t index, const mc_op& op) {
  uint64_t cookie = operations.ops[index].cookie;
  operations.ops[index] = op;
  operations.ops[index].cookie = cookie;
}

void move_batches(const Route& route, size_t part, uint64_t until_ns, Counts& counts) {
  std::mt19937_64 random(part);
  Endpoint& endpoint = *route.endpoint;
  while (now_ns() < until_ns) {
    Operations batch(1 + random() % kCells);
    for (size_t i = 0; i < batch.ops.size(); ++i) {
      uint64_t at = part * kPart + i * kCell, length = 1 + random() % (kCell / 2);
      mc_opcode opcode = random() % 2 ? MC_READ : MC_WRITE;
      set(batch, i, route.op(opcode, at + random() % 64, at + random() % 64, length));
    }
    endpoint.submit(batch);
    bool cancels = random() % 4 == 0;
    if (cancels) endpoint.table().cancel(endpoint.handle(), batch.ops[random() % batch.ops.size()].cookie);
    require(batch.wait(kOperationS), "a batch does not end");
    for (const Slot& slot : batch.slots) {
      int status = slot.result.status;
      require(status == MC_OK || (cancels && status == MC_CANCELLED),
              "an operation failed: " + std::to_string(status) + " " + slot.result.reason);
      ++(status == MC_OK ? counts.moved : counts.cancelled);
    }
  }
}

void check_bytes(const Route& route, Pages& local) {
  for (size_t i = 0; i < kPart; ++i) local.bytes[i] = static_cast<char>(i * 7);
  require(route.try_one(route.op(MC_WRITE, 0, 0, kPart)) == MC_OK, "the last write");
  require(route.try_one(route.op(MC_READ, kPart, 0, kPart)) == MC_OK, "the last read");
  require(std::memcmp(local.bytes, local.bytes + kPart, kPart) == 0, "the bytes differ");
}

}  // namespace sanitized
