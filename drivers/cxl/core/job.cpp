#include "job.hpp"

namespace mooncake::cxl {

Status Job::copy(const driver::Piece& piece, size_t& good) const {
  uint32_t use = 0;
  if (Status status = remote->enter(&use); !status.ok()) return status;
  for (; good < piece.count; ++good) {
    const driver::Move& move = moves[piece.first + good];
    remote->copy(move.opcode, local->base + move.local_offset + piece.offset,
                 move.remote_offset + piece.offset, piece.bytes_of(move), stores_for(move));
  }
  // The pool outlives its members: bytes from or for a dead one must not look like success.
  Status alive = remote->check_alive();
  if (!alive.ok()) good = 0;
  remote->leave(use);
  return alive;
}

}  // namespace mooncake::cxl
