// One instance of the driver in one engine: everything behind an endpoint handle.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>

#include "connection.hpp"
#include "mooncake_driver.h"
#include "regions.hpp"
#include "support/completions.hpp"
#include "support/handles.hpp"
#include "support/keys.hpp"
#include "support/os.hpp"
#include "target.hpp"

namespace template_driver {

using mooncake::driver::HandleTable;

// A peer's region, as import_key named it.
struct Remote {
  mc_handle connection;
  uint64_t region_id;
  mooncake::driver::Key key;
};

// The methods are the functions of mc_driver_v1, whose promises they keep; support/table.hpp makes the C
// table of them, checks pointers for null and keeps exceptions in. Thread-safe.
class Endpoint {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  explicit Endpoint(double timeout_s) : timeout_s_(timeout_s) {}
  // The last thing that is called: the destructor follows, and joins the threads.
  void close() {}
  // Threads do not survive fork(): a child is told that the endpoint is its parent's.
  bool forked() const { return mooncake::driver::fork_generation() != generation_; }

  Status caps(mc_caps& caps) const;
  Status stats(mc_stats& stats) const;
  Status export_address(void* blob, size_t* length) const;
  Status connect(const void* address, size_t length, mc_handle* connection);
  void disconnect(mc_handle connection);

  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status export_key(mc_handle registered, void* blob, size_t* length) const;
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob, size_t* length);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t region_length,
                    const void* blob, size_t length, mc_handle* remote);
  void release_key(mc_handle remote) { remotes_.take(remote); }

  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  // Real hardware: ask the device for what it has finished, too.
  size_t poll(mc_completion* completions, size_t capacity) {
    return completions_.poll(completions, capacity);
  }
  int event_fd() const { return completions_.event_fd(); }
  bool arm() { return completions_.arm(); }
  void cancel(uint64_t cookie);

  Status late_writes(mc_handle connection, void* token, size_t* length) const;
  Status fence(const void* token, size_t length, uint64_t deadline_ns);
  // No submit_on_stream, notify and poll_notices: what a class lacks is null in its table.

 private:
  Status start(const mc_op& op);

  const double timeout_s_;
  const uint32_t generation_ = mooncake::driver::fork_generation();
  // These end in reverse order: connections first, which push their last completions, then the target.
  Completions completions_{4096};
  Regions regions_;
  Target target_{regions_};
  HandleTable<Region> registered_;
  HandleTable<Remote> remotes_;
  HandleTable<Connection> connections_;
  mutable std::mutex mutex_;
  std::set<std::shared_ptr<Connection>> open_;  // those of connections_, to go through them all
};

}  // namespace template_driver
