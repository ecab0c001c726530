#include "job.hpp"

namespace mooncake::shm {

Status Job::copy(const driver::Piece& piece, size_t& good) const {
  Status status = copy_moves(piece, good);
  // A mapping outlives its owner: bytes copied from or to the memory of a dead process must not look like
  // success.
  if (Status alive = access->check_alive(); !alive.ok()) {
    good = 0;
    return alive;
  }
  return status;
}

Status Job::copy_moves(const driver::Piece& piece, size_t& good) const {
  if (!local->own_use.enter(0))
    return failed(MC_INVALID, "the local region was deregistered while the operation waited");
  Status status;
  if (!access->enter()) {
    status = access->denial();
  } else {
    for (; good < piece.count && status.ok(); good += status.ok()) {
      const driver::Move& move = moves[piece.first + good];
      status = access->copy(move.opcode, local->base + move.local_offset + piece.offset,
                            move.remote_offset + piece.offset, piece.bytes_of(move), stores_for(move));
    }
    access->leave();
  }
  local->own_use.leave(0);
  return status;
}

}  // namespace mooncake::shm
