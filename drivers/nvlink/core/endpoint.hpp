// One instance of the driver: everything behind an endpoint handle.
#pragma once

#include <cstddef>
#include <memory>

#include "copies.hpp"
#include "devices.hpp"
#include "memory.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "staging.hpp"
#include "support/completions.hpp"
#include "support/handles.hpp"
#include "support/os.hpp"
#include "support/peers/address.hpp"
#include "support/peers/asker.hpp"
#include "support/peers/grantor.hpp"
#include "support/peers/loop.hpp"

namespace mooncake::nvlink {

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  Endpoint(const Options& options, const Cuda& cuda);
  ~Endpoint() { close(); }
  void close();
  // Neither threads nor CUDA contexts survive fork(): a child must not touch the parent's endpoint.
  bool forked() const { return driver::fork_generation() != generation_; }

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
  void release_key(mc_handle remote) { remotes_.take(remote); }
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob, size_t* length);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  Status submit_on_stream(void* stream, const mc_op* ops, size_t count, size_t* accepted);
  size_t poll(mc_completion* completions, size_t capacity);
  int event_fd() const { return completions_.event_fd(); }
  bool arm();
  void cancel(uint64_t cookie);

 private:
  // The operations of one call, sorted into what each GPU copies.
  class Plan;

  Status start();
  Status submit_all(CUstream stream, const mc_op* ops, size_t count, size_t* accepted);
  Status resolve(const mc_op& op, std::shared_ptr<Region>& region,
                 std::shared_ptr<driver::Remote>& remote) const;
  // When the peer has answered.
  void start_late(const mc_op& op, const Region& region, const std::shared_ptr<driver::Opened>& opened,
                  const Status& refusal);
  void complete(const mc_op& op, const Status& failure);
  // Which GPU copies between the two; kUnknown: none can.
  int choose(const Place& local, const RemoteMemory& remote);

  const Options options_;
  const uint32_t generation_;
  driver::Address address_{};
  Devices devices_;
  driver::Loop loop_;
  Completions completions_;
  Copies copies_;
  StageServer stage_server_;
  StageClient stage_client_;
  std::unique_ptr<driver::Grantor> grantor_;
  std::unique_ptr<driver::Asker> asker_;
  driver::HandleTable<driver::Connection> connections_;
  driver::HandleTable<Region> regions_;
  driver::HandleTable<driver::Remote> remotes_;
  bool closed_ = false;
};

}  // namespace mooncake::nvlink
