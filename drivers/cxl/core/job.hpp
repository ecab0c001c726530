// Operations that submit() did not finish itself.
#pragma once

#include <memory>

#include "region.hpp"
#include "remote.hpp"
#include "support/copies/copy_pool.hpp"

namespace mooncake::cxl {

struct Job : driver::CopyJob {
  Status check(const driver::Move& move) const override {
    return remote->check(move.opcode, move.remote_offset, move.length);
  }
  bool is_of(const void* other) const override { return connection.get() == other; }
  Status copy(const driver::Piece& piece, size_t& good) const override;

  std::shared_ptr<Connection> connection;
  std::shared_ptr<Region> local;
  std::shared_ptr<RemoteRegion> remote;
};

}  // namespace mooncake::cxl
