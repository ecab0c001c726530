// Devices, links and time of the fake driver: what moves when, and what goes wrong.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "completions.hpp"
#include "memory.hpp"
#include "mooncake_driver.h"

namespace mooncake::fake {

// How a device treats operations. Changed by tests at any time; what is under way already keeps its times.
struct Behaviour {
  double latency_s = 0;
  double jitter_s = 0;
  double bandwidth = 0;  // bytes a second of one direction; 0: no limit
  double loss = 0;       // chance of an operation never to complete
  double error_rate = 0;
  double corrupt_rate = 0;
  int error_status = MC_IO;
  uint64_t fail_next = 0;
  uint64_t lose_next = 0;
  uint64_t corrupt_next = 0;
  double notice_delay_s = 0;      // beside the time that an operation takes
  uint64_t lose_notices = 0;      // the next ones never complete
  uint64_t fail_notices = 0;      // the next ones end with an error and are not delivered
  uint64_t doubtful_notices = 0;  // the next ones end with an error and are delivered
  bool alive = true;
  bool frozen = false;   // takes operations and finishes none
  bool holding = false;  // peers that come to its memory stay in it
  bool reorder = false;
  bool record = false;
};

struct Counters {
  uint64_t operations = 0;  // taken
  uint64_t completed = 0;   // without an error
  uint64_t errors = 0;
  uint64_t bytes_read = 0;
  uint64_t bytes_written = 0;
  uint64_t submits = 0;
  uint64_t doorbells = 0;  // runs of operations of one connection in a submit
  uint64_t stream_submits = 0;
  uint64_t cancels = 0;
  uint64_t lost = 0;
  uint64_t corrupted = 0;
  uint64_t refused = 0;  // operations of peers on memory of this device
  uint64_t notices = 0;  // delivered to peers
  uint64_t in_flight = 0;
  uint64_t in_flight_bytes = 0;
  uint64_t in_flight_max = 0;
  uint64_t in_flight_bytes_max = 0;
};

// One operation as a device began to serve it.
struct Served {
  std::string peer;
  uint32_t opcode;
  uint64_t region_id;  // of the peer
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
  uint64_t stream;
};

struct Endpoint;
struct Operation;

// Outlives the endpoints of its name: an engine that comes back finds the device as it was.
struct Device {
  std::string name;
  Behaviour behaviour;
  Counters counters;
  Endpoint* endpoint = nullptr;
  std::deque<std::shared_ptr<Operation>> waiting;
  bool serving = false;
  std::deque<Served> served;
};

// What an engine was told of a device when it opened it; constant from then on.
struct Settings {
  std::string device;
  mc_caps caps{};
  uint64_t queue_ops = 0;      // submit says MC_AGAIN beyond; 0: no limit
  uint64_t notice_room = 256;  // notices of peers that wait to be fetched
  bool cuda_is_host = false;
  uint64_t connect_ms = 0;   // what connect() takes
  uint64_t register_ms = 0;  // what register_memory() takes
  bool has_event_fd = true;  // false: it must be polled on a timer
};

struct Connection {
  uint64_t peer_endpoint;  // number of the endpoint, never used again
  std::string peer_device;
  std::vector<uint64_t> failed;  // cookies of writes whose ends may not have been fetched
};

struct Remote {
  mc_handle connection;
  uint64_t region_id;
  uint8_t key[MC_KEY_BYTES];
};

struct Operation {
  mc_op op;
  Endpoint* from;
  Connection connection;
  Remote remote;
  std::shared_ptr<Memory> local;
  uint64_t stream = 0;
  std::shared_ptr<Memory> theirs;  // once the target has let it in, with the next
  size_t key = 0;
  bool running = false;  // its bytes are being moved now
  bool ended = false;
  bool failed = false;
  std::string notice;                              // of a notice; empty: it moves bytes
  std::vector<std::shared_ptr<Operation>> behind;  // writes that come before the notice
};

class Fabric;

// One device opened by one engine. Everything but `completions` is guarded by the fabric's mutex.
struct Endpoint {
  std::shared_ptr<Fabric> fabric;
  Device* device = nullptr;
  uint64_t number = 0;
  Settings settings;
  Completions completions;
  bool closing = false;
  uint32_t running = 0;
  std::unordered_multimap<uint64_t, std::shared_ptr<Operation>> operations;  // by cookie
  std::map<mc_handle, Connection> connections;
  std::map<mc_handle, Remote> remotes;
  std::map<mc_handle, std::shared_ptr<Memory>> memory;
};

// Thread-safe. With a manual clock nothing happens but in advance(); otherwise one thread does the work.
class Fabric : public std::enable_shared_from_this<Fabric> {
 public:
  Fabric(uint64_t seed, bool manual_clock);
  ~Fabric();
  // Ends the thread. Operations still under way end with MC_UNREACHABLE.
  void stop();

  // ---- what tests do
  uint64_t now_ns();
  void advance(uint64_t ns);
  // The device of a name, made when it is mentioned first. `change` runs with the lock held.
  template <typename Change>
  void with_device(const std::string& name, Change&& change) {
    std::lock_guard lock(mutex_);
    change(device(name));
    changed_.notify_all();
  }
  std::vector<std::string> devices();
  void set_alive(const std::string& name, bool alive);
  void set_frozen(const std::string& name, bool frozen);
  // While it holds, nothing ends that a peer does with its memory.
  void set_holding(const std::string& name, bool holding);
  // How many operations of peers it holds in its memory.
  size_t held_in(const std::string& name);
  // Both directions of the way between two devices.
  void set_link(const std::string& one, const std::string& other, bool up);

  // ---- what the driver's table does
  Result open(const Settings& settings, std::shared_ptr<Endpoint>* out);
  void close(Endpoint& endpoint);
  Result connect(Endpoint& endpoint, uint64_t peer, const std::string& device, mc_handle* out);
  void disconnect(Endpoint& endpoint, mc_handle connection);
  Result add_memory(Endpoint& endpoint, const mc_memory& memory, mc_handle* out);
  Result remove_memory(Endpoint& endpoint, mc_handle handle, uint64_t deadline_ns);
  Result grant(Endpoint& endpoint, mc_handle handle, const uint8_t* key, uint32_t access);
  Result revoke(Endpoint& endpoint, mc_handle handle, const uint8_t* key, uint64_t deadline_ns);
  bool has_memory(Endpoint& endpoint, mc_handle handle);
  Result import_key(Endpoint& endpoint, const Remote& remote, mc_handle* out);
  void release_key(Endpoint& endpoint, mc_handle remote);
  Result submit(Endpoint& endpoint, uint64_t stream, const mc_op* ops, size_t count, size_t* accepted);
  Result notify(Endpoint& endpoint, mc_handle connection, std::string bytes, uint64_t cookie);
  // As if some peer had sent it.
  void inject_notice(const std::string& device, const std::string& bytes);
  void cancel(Endpoint& endpoint, uint64_t cookie);
  mc_stats stats(Endpoint& endpoint);

 private:
  using Lock = std::unique_lock<std::mutex>;
  struct Event {
    std::shared_ptr<Operation> operation;  // null: the device is free again
    Device* device;
  };

  Device& device(const std::string& name);
  void run();
  uint64_t now() const;
  void handle_due(Lock& lock, uint64_t until);
  void at(uint64_t due, Event event);
  bool draw(uint64_t& left, double rate);

  Result start(Endpoint& endpoint, uint64_t stream, const mc_op& op);
  void serve(Device& device);
  void serve_one(Device& device, const std::shared_ptr<Operation>& operation);
  void deliver(Lock& lock, const std::shared_ptr<Operation>& operation);
  Endpoint* target(const Operation& operation) const;
  bool link_up(const std::string& one, const std::string& other) const;
  void admit(Lock& lock, const std::shared_ptr<Operation>& operation, Endpoint& target);
  void move(Lock& lock, const std::shared_ptr<Operation>& operation);
  void end(const std::shared_ptr<Operation>& operation, uint64_t bytes, const Result& result);
  void end_matching(const std::function<bool(const Operation&)>& matches, const Result& result);
  void leave(Operation& operation);
  void release_held();
  void release_inside(const std::string& name);
  void count_start(Endpoint& endpoint, uint64_t bytes);
  void deliver_notice(const std::shared_ptr<Operation>& operation, Endpoint& target);
  bool overtakes(const Operation& notice) const;
  void release_waiting_notices();

  const bool manual_;
  const int owner_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::mt19937_64 random_;
  uint64_t manual_now_ns_ = 0;
  uint64_t sequence_ = 0;
  bool stopping_ = false;
  std::map<std::string, std::unique_ptr<Device>> devices_;
  std::map<uint64_t, Endpoint*> endpoints_;  // by number
  std::set<std::pair<std::string, std::string>> links_down_;
  std::map<std::pair<uint64_t, uint64_t>, Event> events_;  // by due time, then in order of making
  std::vector<std::shared_ptr<Operation>> inside_;         // in the memory of a device that holds them
  std::vector<std::shared_ptr<Operation>> held_;           // due, but one of the two devices is frozen
  std::vector<std::shared_ptr<Operation>> notices_;        // due, but a write before them is under way
  std::thread thread_;
};

// Never 0, never used twice in this process.
uint64_t new_number();

}  // namespace mooncake::fake
