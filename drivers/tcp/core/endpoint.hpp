// One endpoint: listener, workers, peers, regions. Each function of the C table is one function here.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "handles.hpp"
#include "listener.hpp"
#include "peer.hpp"

namespace mooncake_tcp {

class Endpoint {
 public:
  static Status open(const Options& options, std::shared_ptr<Endpoint>* endpoint);
  ~Endpoint() { close(); }

  void close();

  void caps(mc_caps* caps) const;
  void stats(mc_stats* stats) const;
  const std::string& address_blob() const { return address_blob_; }

  Status connect(const void* address, size_t length, mc_handle* connection);
  void disconnect(mc_handle connection);
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  bool is_registered(mc_handle registered) const { return regions_.find(registered) != nullptr; }
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t region_length,
                    mc_handle* remote);
  void release_key(mc_handle remote) { remotes_.remove(remote); }

  // MC_AGAIN when it took only `*accepted`, because there is no room or the next one is invalid: then the
  // next call says so.
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  // Both move bytes of hosted connections first.
  size_t poll(mc_completion* completions, size_t capacity);
  bool arm();
  int event_fd() const { return shared_.poller.fd(); }
  Status cancel(uint64_t cookie);
  // An empty token: there is nothing to fence.
  Status late_writes(mc_handle connection, std::string* token);
  Status fence(const void* token, size_t length, uint64_t deadline_ns);

 private:
  struct Lookup;
  struct Request;
  class OperationBlock;

  Endpoint() = default;
  Status begin();
  std::string end_revoked_uses(const std::shared_ptr<Region>& region, uint64_t deadline_ns);
  static Status prepare(const mc_op& op, Lookup* lookup, OperationBlock* block, Request* request);

  Sessions sessions_;  // before the workers, whose last connections leave it
  Surroundings shared_;
  Key nonce_{};
  std::string address_blob_;
  RegionTable targets_;
  HandleTable<Region> regions_;
  HandleTable<RemoteRegion> remotes_;
  HandleTable<Peer> peers_;
  std::unique_ptr<Listener> listener_;
  std::atomic<size_t> next_worker_{0};
};

}  // namespace mooncake_tcp
