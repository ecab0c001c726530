// What the endpoints of drivers have in common whose peers ask for regions over control connections.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "../calls.hpp"
#include "../completions.hpp"
#include "../handles.hpp"
#include "../os.hpp"
#include "address.hpp"
#include "asker.hpp"
#include "grantor.hpp"
#include "loop.hpp"
#include "mooncake_driver.h"

namespace mooncake::driver {

// Functions of mc_driver_v1, whose promises they keep. Thread-safe. `Region` derives from Owned, and has
// let_go(deadline_ns): the engine takes the memory back, and no peer uses it any more. MC_TIMEOUT: something
// of this side does, and it is called again.
template <class Region>
class PeerEndpoint {
 public:
  // Threads and devices do not survive fork(): a child must not touch the parent's endpoint.
  bool forked() const { return fork_generation() != generation_; }

  Status stats(mc_stats& stats) const {
    completions_.add_to(stats);
    stats.connections = asker_->open_connections();
    stats.refused = grantor_->refused();
    return {};
  }
  Status export_address(void* blob, size_t* length) const {
    return copy_out(&address_, sizeof address_, blob, length);
  }
  Status connect(const void* address, size_t length, mc_handle* connection) {
    Address peer;
    if (Status status = read_address(address_, address, length, peer); !status.ok()) return status;
    if (Status status = asker_->reachable(peer); !status.ok()) return status;
    return connections_.add(asker_->connect(peer), connection);
  }
  void disconnect(mc_handle connection) {
    if (auto taken = connections_.take(connection)) asker_->disconnect(taken);
  }
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns) {
    std::shared_ptr<Region> region = regions_.get(registered);
    if (!region) return no_memory();
    if (Status status = grantor_->withdraw(region, deadline_ns); !status.ok()) return status;
    // Not by the end of the object: whoever saw its last operation complete may hold it for a moment yet, and
    // the memory may be gone when this returns.
    if (Status status = region->let_go(deadline_ns); !status.ok()) return status;
    regions_.take(registered);
    return {};
  }
  Status export_key(mc_handle registered, void*, size_t* length) const {
    if (!regions_.get(registered)) return no_memory();
    *length = 0;  // the owner tells the rest when it is asked
    return {};
  }
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t, const void*,
                    size_t, mc_handle* remote) {
    std::shared_ptr<Connection> peer = connections_.get(connection);
    if (!peer) return failed(MC_INVALID, "no connection has this handle");
    return remotes_.add(asker_->import(peer, region_id, key_from(key)), remote);
  }
  void release_key(mc_handle remote) { remotes_.take(remote); }
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, void*, size_t* length) {
    std::shared_ptr<Region> region = regions_.get(registered);
    if (!region) return no_memory();
    *length = 0;
    return grantor_->grant(region, key, access);
  }
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
    std::shared_ptr<Region> region = regions_.get(registered);
    return region ? grantor_->revoke(region, key, deadline_ns) : no_memory();
  }
  int event_fd() const { return completions_.event_fd(); }

 protected:
  explicit PeerEndpoint(size_t queue_depth) : generation_(fork_generation()), completions_(queue_depth) {}

  // The address is made; `thread` names the service thread.
  Status start_peers(const char* thread, Grantor::Settings settings, GrantorHooks granting,
                     AskerHooks asking) {
    if (generation_ == 0) return failed(MC_NO_MEMORY, "no memory to keep watch for forks");
    if (Status status = completions_.open(); !status.ok()) return status;
    grantor_ = std::make_unique<Grantor>(loop_, settings, address_, std::move(granting));
    asker_ = std::make_unique<Asker>(loop_, settings.answer_timeout_s, address_, std::move(asking));
    if (Status status = loop_.start(thread); !status.ok()) return status;
    return grantor_->listen();
  }
  Status add_region(std::shared_ptr<Region> region, mc_handle* registered) {
    if (Status status = grantor_->add(region); !status.ok()) return status;
    return regions_.add(std::move(region), registered);
  }

  // The objects that an operation names, and whether it makes sense.
  struct Names {
    const mc_op* of = nullptr;
    std::shared_ptr<Region> region;
    std::shared_ptr<Remote> remote;
    Status status;
  };
  // Neighbours in a batch mostly name the same ones: looked up once.
  Status resolve(const mc_op& op, Names& names) const {
    bool same = names.of != nullptr && op.connection == names.of->connection && op.local == names.of->local &&
                op.remote == names.of->remote;
    if (!same) look_up(op, names);
    if (!names.status.ok()) return names.status;
    if (op.opcode > MC_WRITE) return failed(MC_INVALID, "unknown operation");
    const Region& region = *names.region;
    bool inside =
        op.length > 0 && op.local_offset <= region.length && op.length <= region.length - op.local_offset;
    return inside ? Status{} : failed(MC_INVALID, "the range is empty or not inside the local region");
  }
  // The way of a call through submit(): `begin` gets each operation that makes sense, with what it names.
  // `*accepted` is set, also where the queue is full (MC_AGAIN); then what was begun has to be launched.
  template <class Begin>
  Status begin_each(const mc_op* ops, size_t count, size_t* accepted, Begin begin) {
    size_t taken = completions_.reserve(count);
    Names names;
    for (size_t i = 0; i < taken; ++i) {
      if (Status status = resolve(ops[i], names); !status.ok())
        complete(ops[i], status);
      else
        begin(ops[i], names);
    }
    *accepted = taken;
    return taken == count ? Status{} : failed(MC_AGAIN, "the queue is full; fetch completions first");
  }
  void complete(const mc_op& op, const Status& failure) {
    Completion done;
    done.cookie = op.cookie;
    done.opcode = static_cast<mc_opcode>(op.opcode);
    done.fail(failure);
    completions_.push({&done, 1});
  }

  const uint32_t generation_;
  Address address_{};
  Loop loop_;
  Completions completions_;
  std::unique_ptr<Grantor> grantor_;
  std::unique_ptr<Asker> asker_;

 private:
  static Status no_memory() { return failed(MC_INVALID, "no memory is registered under this handle"); }
  void look_up(const mc_op& op, Names& names) const {
    names.of = &op;
    auto connection = connections_.get(op.connection);
    names.region = regions_.get(op.local);
    names.remote = remotes_.get(op.remote);
    if (!connection || !names.region || !names.remote)
      names.status =
          failed(MC_INVALID, "the operation names a connection, local or remote memory that does not exist");
    else if (names.remote->connection.lock() != connection)
      names.status = failed(MC_INVALID, "the remote memory belongs to another connection");
    else
      names.status = {};
  }

  HandleTable<Connection> connections_;
  HandleTable<Region> regions_;
  HandleTable<Remote> remotes_;
};

}  // namespace mooncake::driver
