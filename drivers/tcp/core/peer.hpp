// One peer as initiators see it: operations waiting, and the connections that pull slices of them.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "address.hpp"
#include "completions.hpp"
#include "fence_token.hpp"
#include "operation.hpp"
#include "options.hpp"
#include "ring.hpp"
#include "worker.hpp"

namespace mooncake_tcp {

class Outgoing;

// What a peer shares with its endpoint. Outlives every thread that uses it.
struct Surroundings {
  Options options;
  CompletionQueue completions;
  Poller poller;  // for the engine's threads: completions, and the first connection of each peer
  Counters counters;
  std::vector<SocketAddress> own_hosts;
  SocketAddress source;  // where the endpoint listens
  std::vector<std::unique_ptr<Worker>> workers;
};

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // `first_worker` spreads the connections of different peers over the workers.
  static std::shared_ptr<Peer> make(EndpointAddress address, uint64_t session, Surroundings& surroundings,
                                    size_t first_worker);
  ~Peer();

  void submit(std::vector<std::shared_ptr<Operation>> operations);
  void cancel(uint64_t cookie);
  // Which connections may still bring bytes of writes that are over: what the peer's endpoint is to end.
  FenceToken late_writes();
  bool has_late_writes() { return !late_writes().lanes.empty(); }
  // Ends every operation with MC_CLOSED, and every connection.
  void disconnect();

  // ---- for its connections, on their workers' threads
  const EndpointAddress& address() const { return address_; }
  uint64_t session() const { return session_; }
  Surroundings& surroundings() const { return surroundings_; }
  // Appends slices of at most `room` bytes and `count` in number, the fair share of connection `index` of
  // what waits. No writes while another connection is fenced.
  void take(size_t index, uint64_t room, size_t count, std::vector<Slice>* slices);
  void slices_done(const std::vector<Slice>& slices);
  void slice_failed(const Slice& slice, const Status& status);
  // What fences a connection, see Lane. Each comes before slice_failed() of the slices. `generation`: of the
  // attempt that made the connection.
  void write_dropped(size_t index, uint64_t generation);
  void dropped_write_answered(size_t index);
  void writes_lost(size_t index, uint64_t generation);
  void welcomed(size_t index);
  // Connection `index` ended. `was_ready`: it had worked; otherwise it could not be set up.
  void lost(size_t index, const Status& status, bool was_ready);

 private:
  // What submitting threads know of a connection.
  struct Lane {
    std::unique_ptr<Outgoing> connection;
    bool engaged = false;      // up, or being set up: it will take what waits, or report lost()
    uint64_t retry_at_ns = 0;  // after a failure others are preferred until then
    // The fence: bytes of writes that were reported as cancelled or failed may reach the target yet, and must
    // not land on those of a later write. Later ones of the same connection come behind them; those of other
    // connections wait.
    size_t dropped_writes = 0;  // cancelled and not answered
    bool writes_lost = false;  // unanswered when it broke; the next welcome says that nothing is left of them
    uint64_t generation = 0;   // of the last connection that this is about

    bool fenced() const { return dropped_writes != 0 || writes_lost; }
  };
  // Operations with bytes that no connection has. Those that ended while they waited linger, but are never
  // more than the others.
  struct Queue {
    Ring<std::shared_ptr<Operation>> operations;
    size_t ended = 0;

    void tidy();
  };

  // A small one never waits behind the slices of a bulk one.
  struct Queues {
    Queue small, bulk;
  };

  Peer(EndpointAddress address, uint64_t session, Surroundings& surroundings);

  std::vector<Outgoing*> engage_for_waiting();
  std::vector<Outgoing*> with_fenced(std::vector<Outgoing*> chosen);
  std::vector<Outgoing*> engaged() const;
  void withdraw(Operation& operation, const Status& status);
  void settle(const std::shared_ptr<Operation>& operation);
  void finish(const std::shared_ptr<Operation>& operation, std::vector<Completion>* completions);
  void fail_waiting(Queues& queues, const Status& status);
  bool is_bulk(uint64_t length) const;
  bool idle() const;
  bool may_write(size_t index) const;
  bool may_take_bulk(size_t index) const;
  bool writes_wait() const;
  Queue& queue_of(const Operation& operation);
  Queue* next_queue(bool may_write, bool may_take_bulk);
  void tidy();
  void wake_for_waiting();

  const EndpointAddress address_;
  const uint64_t session_;  // random: tells the peer which connections are of the same initiator
  Surroundings& surroundings_;
  const bool near_;  // on this host
  std::vector<Lane> lanes_;
  std::mutex mutex_;  // everything below, and the lanes' fields other than `connection`
  Queues reads_, writes_;
  std::vector<Completion> completed_;  // of slices_done(), to keep its memory
  uint64_t next_order_ = 0;
  uint64_t waiting_bytes_ = 0;
  uint64_t waiting_bulk_bytes_ = 0;  // of these
  LiveOperations live_;
};

}  // namespace mooncake_tcp
