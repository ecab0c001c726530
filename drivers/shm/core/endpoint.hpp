// One instance of the driver: everything behind an endpoint handle.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "completions.hpp"
#include "copy_pool.hpp"
#include "handles.hpp"
#include "host.hpp"
#include "initiator.hpp"
#include "loop.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "region.hpp"
#include "status.hpp"
#include "target.hpp"

namespace mooncake::shm {

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  explicit Endpoint(const Options& options);
  ~Endpoint() { close(); }
  void close();
  // Threads do not survive fork(): a child must not touch the parent's endpoint.
  bool forked() const;

  Status stats(mc_stats& stats) const;
  Status export_address(void* blob, size_t* length) const;
  Status connect(const void* address, size_t length, mc_handle* connection);
  void disconnect(mc_handle connection);
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status export_key(mc_handle registered, size_t* length) const;
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, mc_handle* remote);
  void release_key(mc_handle remote) { remotes_.take(remote); }
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  Completions& completions() { return completions_; }
  void cancel(uint64_t cookie);

 private:
  // The objects that an operation names. Neighbours in a batch mostly name the same ones: looked up once.
  struct Names {
    mc_handle connection_handle = 0, local_handle = 0, remote_handle = 0;
    std::shared_ptr<Connection> connection;
    std::shared_ptr<Region> local;
    std::shared_ptr<RemoteRegion> remote;
  };
  // The operations of one submit() that are finished within it.
  struct Batch {
    std::vector<Completion> finished;
    size_t proven = 0;                     // of `finished`, from the front
    std::shared_ptr<const Access> access;  // what the later ones copied from or to

    // Bytes copied from or to the memory of a dead process must not look like success: one look for many
    // copies.
    void prove();
  };
  Status start();
  Status resolve(const mc_op& op, Names& names) const;
  void place(const mc_op& op, const Names& names, bool copy_inline, Batch& batch);

  const Options options_;
  const pid_t owner_;
  Address address_{};
  Loop loop_;
  Completions completions_;
  CopyPool pool_;
  Target target_;
  Initiator initiator_;
  HandleTable<Connection> connections_;
  HandleTable<Region> regions_;
  HandleTable<RemoteRegion> remotes_;
};

}  // namespace mooncake::shm
