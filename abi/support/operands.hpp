// What an operation names: a connection, memory of this side, memory of the other.
#pragma once

#include <memory>

#include "handles.hpp"
#include "mooncake_driver.h"
#include "status.hpp"

namespace mooncake::driver {

// The objects behind the handles of one operation after another. Neighbours in a batch mostly name the same
// ones: those are looked up once. `Region` has a length, `RemoteRegion` the connection_id of the `Connection`
// with that id. For one call of submit(): the pointers hold as long as the engine may use the handles.
template <class Connection, class Region, class RemoteRegion>
class Operands {
 public:
  Operands(const HandleTable<Connection>& connections, const HandleTable<Region>& regions,
           const HandleTable<RemoteRegion>& remotes)
      : connections_(connections), regions_(regions), remotes_(remotes) {}

  // Whether the operation can be carried out: it reads or writes bytes inside the region of this side. What
  // it names is there until the next call; after false, status() says why not.
  bool resolve(const mc_op& op) {
    if (op.connection != connection_handle_ || op.local != local_handle_ || op.remote != remote_handle_)
      look_up(op);
    if (connection_ == nullptr || local_ == nullptr || remote_ == nullptr) return false;
    bool known = op.opcode == MC_READ || op.opcode == MC_WRITE;
    bool fits = op.length > 0 && op.local_offset <= (*local_)->length &&
                op.length <= (*local_)->length - op.local_offset;
    bool reaches = (*remote_)->connection_id == (*connection_)->id;
    if (known && fits && reaches) [[likely]]
      return true;
    status_ = failed(MC_INVALID, !known  ? "unknown operation"
                                 : !fits ? "the range is empty or not inside the local region"
                                         : "the remote memory belongs to another connection");
    return false;
  }

  const std::shared_ptr<Connection>& connection() const { return *connection_; }
  const std::shared_ptr<Region>& local() const { return *local_; }
  const std::shared_ptr<RemoteRegion>& remote() const { return *remote_; }
  const Status& status() const { return status_; }

 private:
  void look_up(const mc_op& op) {
    connection_ = connections_.find(op.connection);
    local_ = regions_.find(op.local);
    remote_ = remotes_.find(op.remote);
    connection_handle_ = op.connection;
    local_handle_ = op.local;
    remote_handle_ = op.remote;
    if (connection_ == nullptr || local_ == nullptr || remote_ == nullptr)
      status_ =
          failed(MC_INVALID, "the operation names a connection, local or remote memory that does not exist");
  }

  const HandleTable<Connection>& connections_;
  const HandleTable<Region>& regions_;
  const HandleTable<RemoteRegion>& remotes_;
  mc_handle connection_handle_ = 0, local_handle_ = 0, remote_handle_ = 0;
  const std::shared_ptr<Connection>* connection_ = nullptr;
  const std::shared_ptr<Region>* local_ = nullptr;
  const std::shared_ptr<RemoteRegion>* remote_ = nullptr;
  Status status_;
};

}  // namespace mooncake::driver
