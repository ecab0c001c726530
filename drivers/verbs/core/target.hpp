// The side that owns memory: it listens, makes queue pairs for peers, and tells who has the key where a
// region is. The bytes pass it by.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "address.hpp"
#include "channel.hpp"
#include "inbox.hpp"
#include "poller.hpp"
#include "queue_pair.hpp"
#include "region.hpp"

namespace mooncake::verbs {

class Target {
 public:
  Target(const Options& options, std::unique_ptr<Device>& device, Regions& regions, Inbox& inbox,
         Poller& poller)
      : options_(options), device_(device), regions_(regions), inbox_(inbox), poller_(poller) {}

  Status listen();
  const Address& address() const { return address_; }
  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  // Any thread. Has the control thread end the queue pairs that a token of late_writes() names, which takes
  // the device's time. After MC_TIMEOUT it goes on with it.
  Status fence(const void* token, size_t length, uint64_t deadline_ns);

  // ---- the control thread
  void accept_peers();
  void on_socket(uint64_t id, uint32_t events);
  // Does what others asked for, and drops who connected and has not said hello in time; returns when it wants
  // to be called again.
  uint64_t attend();
  void close();

 private:
  struct Session {
    explicit Session(driver::UniqueFd fd) : channel(std::move(fd)) {}
    Channel channel;
    uint64_t id = 0;
    uint64_t deadline_ns = 0;  // for its hello; 0 when it has come
    bool writes = false;
    Nonce name{};
    uint64_t generation = 0;
    std::vector<std::unique_ptr<QueuePair>> qps;
    std::unique_ptr<Inbox::Box> box;
  };

  struct Fence {
    Nonce name{};
    uint64_t generation = 0;
    bool done = false;
  };

  bool read(Session& session);
  bool on_message(Session& session, Message kind, const std::string& payload);
  void on_hello(Session& session, const Greeting& hello);
  Status make_queue_pairs(Session& session, const Greeting& hello, Greeting& answer);
  void tell_of_free_places();
  void on_import(Session& session, const ImportRequest& request);
  bool send(Session& session, const std::string& bytes);
  // Ends the queue pairs of a connection up to a generation, whatever socket they came by.
  void end_generations(const Nonce& name, uint64_t generation);
  void end_queue_pairs(Session& session);
  void end_fenced();
  void drop(uint64_t id);

  const Options& options_;
  std::unique_ptr<Device>& device_;
  Regions& regions_;
  Inbox& inbox_;
  Poller& poller_;
  Address address_;
  driver::UniqueFd listener_;
  std::atomic<uint64_t> refused_{0};
  std::mutex mutex_;
  std::condition_variable fenced_;
  std::vector<std::shared_ptr<Fence>> fences_;  // guarded by the mutex, as the next
  bool closed_ = false;
  // ---- control thread only
  std::unordered_map<uint64_t, std::unique_ptr<Session>> sessions_;
  size_t strangers_ = 0;
  uint64_t rest_until_ns_ = 0;  // the listener is not watched before; 0: it is
};

}  // namespace mooncake::verbs
