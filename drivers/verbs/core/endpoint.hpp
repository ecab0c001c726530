// One instance of the driver: everything behind an endpoint handle.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include "initiator.hpp"
#include "support/handles.hpp"
#include "target.hpp"

namespace mooncake::verbs {

using driver::HandleTable;

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  explicit Endpoint(const Options& options);
  ~Endpoint() { close(); }
  void close();
  bool forked() const { return driver::fork_generation() != generation_; }

  Status caps(mc_caps& caps) const;
  Status stats(mc_stats& stats);
  Counters counters() { return initiator_.counters(); }
  Status export_address(void* blob, size_t* length) const;
  Status connect(const void* address, size_t length, mc_handle* connection);
  void disconnect(mc_handle connection);
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status export_key(mc_handle registered, void* blob, size_t* length);
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t region_length,
                    const void* blob, size_t length, mc_handle* remote);
  void release_key(mc_handle remote);
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob, size_t* length);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  size_t poll(mc_completion* completions, size_t capacity);
  int event_fd() const { return events_.get(); }
  bool arm() { return initiator_.arm() && inbox_.arm() && completions_.arm(); }
  void cancel(uint64_t cookie) { initiator_.cancel(cookie); }
  Status notify(mc_handle connection, const void* data, size_t length, uint64_t cookie);
  size_t poll_notices(mc_notice* notices, size_t capacity) { return inbox_.poll(notices, capacity); }
  Status late_writes(mc_handle connection, void* token, size_t* length);
  Status fence(const void* token, size_t length, uint64_t deadline_ns);

 private:
  // Neighbours in a batch mostly name the same objects: looked up once.
  struct Lookup {
    mc_handle connection = 0, local = 0, remote = 0;
    Initiator::Names names;
  };
  Status start();
  void run();
  const Initiator::Names& look_up(const mc_op& op, Lookup& lookup) const;

  const Options options_;
  const uint32_t generation_;
  std::unique_ptr<Device> device_;  // outlives what uses it
  Poller poller_;
  Completions completions_;
  Regions regions_;
  Inbox inbox_;
  Initiator initiator_;
  Target target_;
  HandleTable<Connection> connections_;
  HandleTable<Region> locals_;
  HandleTable<Remote> remotes_;
  driver::UniqueFd events_;  // an epoll descriptor with that of the completions and that of the device
  std::atomic<bool> stopping_{false};
  std::thread control_;
};

}  // namespace mooncake::verbs
