// The side that starts operations: posts them, fetches what the device has done, and keeps connections alive.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "connection.hpp"
#include "pace.hpp"
#include "poller.hpp"
#include "support/completions.hpp"
#include "tags.hpp"

namespace mooncake::verbs {

using driver::Completion;
using driver::Completions;

class Initiator {
 public:
  Initiator(const Options& options, std::unique_ptr<Device>& device, Regions& regions,
            Completions& completions, Poller& poller)
      : options_(options),
        device_(device),
        regions_(regions),
        completions_(completions),
        poller_(poller),
        operations_(options.queue_depth) {}

  Status start();

  // ---- any thread
  std::shared_ptr<Connection> connect(Address peer);
  void disconnect(const std::shared_ptr<Connection>& connection);
  std::shared_ptr<Remote> import(Connection& connection, uint64_t region_id, const uint8_t* key);
  void release(Remote& remote);
  // What an operation names, found by the endpoint.
  struct Names {
    Connection* connection = nullptr;
    Region* region = nullptr;
    Remote* remote = nullptr;
    Status status;
  };
  // Takes `count` operations, for which there is room. `names(op)` finds what one names.
  template <class Find>
  void submit(const mc_op* ops, size_t count, Find&& names) {
    std::lock_guard lock(mutex_);
    last_ = kNone;
    for (size_t i = 0; i < count; ++i) accept(ops[i], names(ops[i]));
    pump_touched();
    deliver();
  }
  // Fetches what the device has done and posts what waits for room.
  void progress();
  // So many completions went to the engine.
  void fetched(size_t count) { polled_.fetch_add(count, std::memory_order_relaxed); }
  // False when the device has something to fetch. Otherwise its channel becomes readable when it has.
  bool arm();
  void cancel(uint64_t cookie);
  Status late_writes(Connection& connection, void* token, size_t* length);
  uint32_t open_connections();
  Counters counters();

  // MC_AGAIN when there is no room for it.
  Status notify(Connection& connection, const void* data, size_t length, uint64_t cookie);

  // ---- the control thread
  // Does what is due; returns when it wants to be called again.
  uint64_t attend();
  void on_socket(uint64_t id, uint32_t events);
  void lose_device();
  // Ends everything. After it nothing is posted and the device has let go of all memory.
  void close();

 private:
  using State = Connection::State;

  // initiator.cpp, notices.cpp: the way of an operation. All with the mutex held.
  void accept(const mc_op& op, const Names& names);
  void place(uint32_t index);
  bool merge(const mc_op& op, const Names& names);
  void touch(Connection& connection);
  void pump_touched();
  void pump(Connection& connection);
  QueuePair* choose(Connection& connection, uint64_t length);
  void post_slice(QueuePair& qp, Operation& operation, uint32_t index, uint64_t length);
  bool post_chains(Connection& connection);
  void fetch(bool all = false);
  void want_answer(Remote& remote);
  void on_completion(const ibv::Wc& wc);
  void slice_done(const QueuePair::Posted& posted);
  void broken(Connection& connection, Status cause);
  void finish(uint32_t index, const Status* status);
  // The operation is all with the device, or will not be.
  void leave_queue(Connection& connection, Operation& operation) {
    if (!std::exchange(operation.unposted, false)) return;
    --connection.unposted;
    if (!connection.notices.empty()) [[unlikely]]
      count_down(connection, operation);
  }
  void return_to_queue(Connection& connection, Operation& operation);
  void count_down(Connection& connection, const Operation& operation);
  void fail_notices(Connection& connection, const Operation& operation, const Status& status);
  QueuePair* way_of(const Connection& connection, const Notice& notice);
  void post_notices(Connection& connection);
  void end_notices(Connection& connection, const Status& status);
  void cancel_notices(Connection& connection, uint64_t cookie);
  Status prepare_notices();
  void deliver();

  // reconnect.cpp: the life of a connection.
  void ask_for_control(Connection& connection);
  void step(const std::shared_ptr<Connection>& connection);
  void dial(Connection& connection);
  void dialed(Connection& connection);
  void greet(Connection& connection);
  void welcome(Connection& connection, const Greeting& greeting);
  void imported(Connection& connection, ImportAnswer answer);
  void took(Connection& connection, const Taken& taken);
  Status check_tags(size_t count);
  void ask_for_keys(Connection& connection);
  void read(Connection& connection);
  void hang_up(Connection& connection);
  // Ends queue pairs, and completes or queues again what was posted to them.
  void take_down(Connection& connection);
  // Ends a connection that cannot be made: operations that wait for it fail.
  void give_up(Connection& connection, Status status);
  void fail_waiting(Connection& connection, const Status& status);
  void make_room();
  std::shared_ptr<Connection> find_idle();
  void send(Connection& connection, const std::string& bytes);
  void wait_for_time(Connection& connection);
  void requeue_lost(Connection& connection, const std::vector<uint32_t>& lost);

  const Options& options_;
  std::unique_ptr<Device>& device_;
  Regions& regions_;
  Completions& completions_;
  Poller& poller_;

  std::mutex mutex_;
  Operations operations_;
  uint32_t room_ = 0;  // in the completion queue, if every work request outstanding completed at once
  Tags tags_;
  Pace pace_;
  // Memory of notices on their way: one slot each.
  std::vector<uint8_t> notice_bytes_;
  std::shared_ptr<Registration> notice_memory_;
  std::vector<uint32_t> notice_slots_;  // free
  std::vector<Connection*> touched_;
  std::vector<Connection*> stalled_;
  std::vector<Completion> finished_;
  std::vector<ibv::Wc> fetched_;
  Counters counters_;
  uint64_t delivered_ = 0;           // completions handed over, and
  std::atomic<uint64_t> polled_{0};  // fetched by the engine, in the same order
  uint32_t last_ = kNone;            // the operation that the next one of a batch may be merged into
  uint32_t ready_ = 0;               // connections with queue pairs
  uint32_t posted_ = 0;              // work requests outstanding
  bool notified_ = false;            // the completion queue shall raise, or has raised, an event
  size_t hand_ = 0;                  // of the sweep over idle connections
  std::vector<std::shared_ptr<Connection>> connections_;
  std::vector<std::shared_ptr<Connection>> attention_;
  // ---- control thread only
  std::unordered_map<uint64_t, std::shared_ptr<Connection>> by_socket_;
  std::vector<std::shared_ptr<Connection>> timed_;
  uint64_t next_ask_ = 1;
};

}  // namespace mooncake::verbs
