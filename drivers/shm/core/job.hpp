// Operations that submit() did not finish itself.
#pragma once

#include <memory>

#include "access.hpp"
#include "region.hpp"
#include "support/copies/copy_pool.hpp"

namespace mooncake::shm {

struct Connection;
struct RemoteRegion;

struct Job : driver::CopyJob {
  Status check(const driver::Move& move) const override {
    return access->check(move.opcode, move.remote_offset, move.length);
  }
  // Otherwise the kernel copies.
  bool has_stores() const override { return access->mapping() != nullptr; }
  bool is_of(const void* other) const override { return connection.get() == other; }
  Status copy(const driver::Piece& piece, size_t& good) const override;

  std::shared_ptr<Connection> connection;
  std::shared_ptr<Region> local;
  std::shared_ptr<RemoteRegion> remote;
  std::shared_ptr<const Access> access;  // before the pool runs it

 private:
  Status copy_moves(const driver::Piece& piece, size_t& good) const;
};

}  // namespace mooncake::shm
