// This side of connections to peers: the hello, the asking for regions, and who learns when a peer is lost.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "access.hpp"
#include "job.hpp"
#include "link.hpp"
#include "options.hpp"
#include "region.hpp"

namespace mooncake::shm {

// A peer's region as this side knows it.
struct RemoteRegion {
  enum class State { kUnasked, kAsked, kOpen, kRefused };

  // For submit(), which takes no lock: while `users` counts it, what it finds in `open` is not let go of.
  std::atomic<uint32_t> users{0};
  std::atomic<const Access*> open{nullptr};  // access.get(), while there is any

  // Constant.
  uint64_t connection_id = 0;
  uint64_t id = 0;
  Key key{};

  // Guarded by the initiator's mutex.
  State state = State::kUnasked;
  std::shared_ptr<const Access> access;  // while kOpen
  Status refusal;                        // while kRefused
  uint64_t ask_again_ns = 0;             // a passing reason may have passed by then
  std::vector<std::shared_ptr<Job>> waiting;
};

// Outlives its sockets: after a loss the next operation begins a new attempt.
struct Connection {
  enum class State { kConnecting, kReady, kLost, kClosed };

  uint64_t id = 0;
  Address address{};

  // Guarded by the initiator's mutex.
  State state = State::kConnecting;
  uint64_t attempt = 1;        // tells what is left of an earlier attempt from what belongs to this one
  std::shared_ptr<Link> link;  // of this attempt
  std::map<std::pair<uint64_t, Key>, std::shared_ptr<RemoteRegion>> regions;
  std::vector<std::shared_ptr<RemoteRegion>> unasked;                 // to be asked for after the welcome
  std::unordered_map<uint64_t, std::shared_ptr<RemoteRegion>> asked;  // by Message::request
};

// Thread-safe.
class Initiator {
 public:
  Initiator(Loop& loop, driver::CopyPool& pool, const Options& options)
      : loop_(loop), pool_(pool), options_(options) {}

  std::shared_ptr<Connection> connect(const Address& address);
  void disconnect(const std::shared_ptr<Connection>& connection);
  // Ends every connection.
  void close();

  // Names a peer's region; the asking begins at once. The same region and key give the same object.
  std::shared_ptr<RemoteRegion> import(const std::shared_ptr<Connection>& connection, uint64_t region_id,
                                       const Key& key);

  // For a job that was added to the pool: it runs, fails, or waits for the owner's answer. Connects anew
  // after a loss.
  void place(const std::shared_ptr<Job>& job);

  uint32_t open_connections() const;

 private:
  using ConnectionPointer = std::shared_ptr<Connection>;

  using RemotePointer = std::shared_ptr<RemoteRegion>;
  struct LetGo {
    RemotePointer remote;
    std::shared_ptr<const Access> access;
  };

  // One attempt to reach a peer, as tasks and handlers of the service thread name it.
  struct Attempt {
    ConnectionPointer connection;
    uint64_t number;
  };

  void run(const std::shared_ptr<Job>& job, std::shared_ptr<const Access> access);

  // On the service thread.
  void begin(const Attempt& attempt);
  void try_to_connect(const Attempt& attempt, uint64_t deadline_ns);
  void greet(const Attempt& attempt, std::shared_ptr<Link> link);
  void on_event(const Attempt& attempt, Link& link, uint32_t epoll_events);
  bool on_message(const Attempt& attempt, Link& link, const Message& message, UniqueFd passed);
  bool on_life(const Attempt& attempt, Link& link, UniqueFd passed);
  bool on_welcome(const Attempt& attempt, Link& link, const Message& welcome, UniqueFd passed);
  void on_grant(const Attempt& attempt, const Message& grant, UniqueFd passed);
  void on_revoked(const Attempt& attempt, const Message& notice);
  void ask(const Attempt& attempt, const RemotePointer& remote);
  void send(const Attempt& attempt, Link& link, const Message& message);
  void populate(const std::shared_ptr<Mapping>& mapping, size_t from);
  void finish_letting_go(std::vector<LetGo> all);

  // With the mutex held.
  bool current(const Attempt& attempt) const;
  void want(const ConnectionPointer& connection, const RemotePointer& remote);
  void shut_region(const RemotePointer& remote, std::vector<LetGo>& all);

  void lose(const Attempt& attempt, const Status& failure);
  // Attempt 0 stands for whichever there is.
  void end(const Attempt& attempt, Connection::State state, const Status& failure);
  void settle(const Attempt& attempt, const RemotePointer& remote, std::shared_ptr<const Access> access,
              const Status& refusal);
  void let_go(std::vector<LetGo> all);

  Loop& loop_;
  driver::CopyPool& pool_;
  const Options& options_;

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, ConnectionPointer> connections_;
  uint64_t next_id_ = 1;
  uint64_t next_request_ = 1;  // service thread only
};

}  // namespace mooncake::shm
