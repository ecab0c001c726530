// One instance of the driver: everything behind an endpoint handle.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "borrowed.hpp"
#include "host.hpp"
#include "io.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "region.hpp"
#include "support/completions.hpp"
#include "support/handles.hpp"
#include "support/peers/loop.hpp"

namespace mooncake::nvmeof {

using driver::HandleTable;

struct Connection {
  std::shared_ptr<Owner> owner;             // of the same process; null: of another one
  std::shared_ptr<driver::Connection> far;  // then this
  std::mutex mutex;
  std::vector<std::weak_ptr<Device>> devices;  // that were borrowed over it
  uint64_t late_ns();
};

// A region of the owner, under one key.
struct RemoteRegion {
  std::shared_ptr<Owner> owner;
  std::shared_ptr<driver::Remote> far;  // of another process: the rest is unused
  uint64_t id = 0;
  Key key{};
  std::mutex mutex;
  std::shared_ptr<Region> region;  // found by the first operation
  std::shared_ptr<Uses> uses;
};

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  explicit Endpoint(const Options& options);
  ~Endpoint() { close(); }
  void close();
  // Rings and threads are the parent's: a child must not touch them.
  bool forked() const { return fork_generation() != generation_; }

  Status caps(mc_caps& caps) const;
  Status stats(mc_stats& stats) const;
  Status export_address(void* blob, size_t* length) const;
  Status connect(const void* address, size_t length, mc_handle* connection);
  void disconnect(mc_handle connection);
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status export_key(mc_handle registered, void* blob, size_t* length) const;
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t region_length,
                    const void* blob, size_t length, mc_handle* remote);
  void release_key(mc_handle remote);
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob, size_t* length);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  size_t poll(mc_completion* completions, size_t capacity);
  int event_fd() const { return io_->event_fd(); }
  bool arm();
  void cancel(uint64_t cookie);
  Status late_writes(mc_handle connection, void* token, size_t* length);
  Status fence(const void* token, size_t length, uint64_t deadline_ns);

 private:
  Status start();
  Status start_peers();
  Status publish(const std::shared_ptr<Region>& region, const uint8_t* key, mc_handle* registered);
  Status open_device(const mc_memory& memory, std::shared_ptr<Device>& device) const;
  Status prepare(const mc_op& op, Job*& job);
  Status enter(const mc_op& op, RemoteRegion& remote, std::shared_ptr<Region>& region,
               std::shared_ptr<Uses>& uses);
  // Of a region of another process: MC_AGAIN: it waits until that has answered.
  Status enter_far(const mc_op& op, const std::shared_ptr<Region>& local,
                   const std::shared_ptr<Connection>& connection, RemoteRegion& remote, Job*& job);
  Status begin_far(const mc_op& op, const std::shared_ptr<Region>& local, Connection& connection,
                   const std::shared_ptr<driver::Opened>& opened, Job*& job);
  Job& fill(const mc_op& op, const std::shared_ptr<Region>& local, std::shared_ptr<Region> remote);
  void complete(const mc_op& op, const Status& failure);
  static Status wait_for(const std::vector<std::shared_ptr<Uses>>& uses, uint64_t deadline_ns);

  const Options options_;
  const uint32_t generation_;
  driver::Address address_{};
  EndpointId id_{};
  driver::Loop loop_;
  Completions completions_;
  std::shared_ptr<Io> io_;
  std::shared_ptr<Owner> owner_ = std::make_shared<Owner>();
  std::unique_ptr<driver::Grantor> grantor_;
  std::unique_ptr<driver::Asker> asker_;
  std::atomic<uint64_t> refused_{0};
  HandleTable<Connection> connections_;
  HandleTable<Region> regions_;
  HandleTable<RemoteRegion> remotes_;
};

}  // namespace mooncake::nvmeof
