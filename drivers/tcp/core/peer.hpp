// One peer as initiators see it: operations waiting, and the connections that pull slices of them.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "address.hpp"
#include "completions.hpp"
#include "operation.hpp"
#include "options.hpp"
#include "worker.hpp"

namespace mooncake_tcp {

class Outgoing;

// What a peer shares with its endpoint. Outlives every thread that uses it.
struct Surroundings {
  Options options;
  CompletionQueue completions;
  Counters counters;
  std::vector<SocketAddress> own_hosts;
  std::vector<std::unique_ptr<Worker>> workers;
};

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // `first_worker` spreads the connections of different peers over the workers.
  static std::shared_ptr<Peer> make(EndpointAddress address, Surroundings& surroundings, size_t first_worker);
  ~Peer();

  void submit(std::vector<std::shared_ptr<Operation>> operations);
  void cancel(uint64_t cookie);
  // Ends every operation with MC_CLOSED and every connection.
  void disconnect();

  // ---- for its connections, on their workers' threads
  const EndpointAddress& address() const { return address_; }
  Surroundings& surroundings() const { return surroundings_; }
  // Appends slices of at most `room` bytes and `count` in number, the connection's fair share of what waits.
  void take(uint64_t room, size_t count, std::vector<Slice>* slices);
  void slice_done(const Slice& slice);
  void slice_failed(const Slice& slice, const Status& status);
  // Connection `index` ended. `was_ready`: it had worked; otherwise it could not be set up.
  void lost(size_t index, const Status& status, bool was_ready);

 private:
  // What submitting threads know of a connection.
  struct Lane {
    std::unique_ptr<Outgoing> connection;
    bool engaged = false;      // up, or being set up: it will take what waits, or report lost()
    uint64_t retry_at_ns = 0;  // after a failure others are preferred until then
  };

  Peer(EndpointAddress address, Surroundings& surroundings);

  std::vector<Outgoing*> engage_for_waiting();
  std::vector<Outgoing*> engaged() const;
  void withdraw(Operation& operation, const Status& status);
  void settle(const std::shared_ptr<Operation>& operation);
  void fail_waiting(const Status& status);

  const EndpointAddress address_;
  Surroundings& surroundings_;
  std::vector<Lane> lanes_;
  std::mutex mutex_;  // everything below, and the lanes' fields other than `connection`
  std::deque<std::shared_ptr<Operation>> waiting_;  // with bytes no connection has; ended ones may linger
  uint64_t waiting_bytes_ = 0;
  std::unordered_multimap<uint64_t, std::shared_ptr<Operation>> live_;  // by cookie
};

}  // namespace mooncake_tcp
