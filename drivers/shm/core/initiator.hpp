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
#include "copy_pool.hpp"
#include "host.hpp"
#include "link.hpp"
#include "loop.hpp"
#include "options.hpp"
#include "region.hpp"

namespace mooncake::shm {

// A peer's region as this side knows it. Guarded by the initiator's mutex.
struct RemoteRegion {
  uint64_t connection_id = 0;
  uint64_t id = 0;
  Key key{};
  Status refusal;                        // not OK: for as long as this object lives
  std::shared_ptr<const Access> access;  // null until the owner has granted it
  std::vector<std::shared_ptr<Operation>> waiting;
};

struct Connection {
  enum class State { kConnecting, kReady, kLost };

  uint64_t id = 0;
  Address address{};

  std::shared_ptr<Link> link;  // for the service thread alone

  std::atomic<bool> closed{false};  // by disconnect() or close()

  // Guarded by the initiator's mutex.
  State state = State::kConnecting;
  Status failure;
  std::map<std::pair<uint64_t, Key>, std::shared_ptr<RemoteRegion>> regions;
  std::unordered_map<uint64_t, std::shared_ptr<RemoteRegion>> asked;  // by Message::request
};

// Thread-safe.
class Initiator {
 public:
  Initiator(Loop& loop, CopyPool& pool, const Options& options)
      : loop_(loop), pool_(pool), options_(options) {}

  std::shared_ptr<Connection> connect(const Address& address);
  void disconnect(const std::shared_ptr<Connection>& connection);
  // Ends every connection.
  void close();

  // Names a peer's region; the asking begins at once. The same region and key give the same object.
  std::shared_ptr<RemoteRegion> import(const std::shared_ptr<Connection>& connection, uint64_t region_id,
                                       const Key& key);

  // The access to a region, or null: then `failure` tells why it never comes, or is OK while the answer is
  // awaited.
  std::shared_ptr<const Access> look_up(const Connection& connection, const RemoteRegion& remote,
                                        Status& failure);
  // For an operation that was added to the pool: it runs, fails, or waits for the owner's answer.
  void park(const std::shared_ptr<Operation>& operation);

  uint32_t open_connections() const;

 private:
  using ConnectionPointer = std::shared_ptr<Connection>;

  // On the service thread.
  void begin(const ConnectionPointer& connection);
  void try_to_connect(const ConnectionPointer& connection, uint64_t deadline_ns);
  void greet(const ConnectionPointer& connection);
  void on_event(const ConnectionPointer& connection, uint32_t epoll_events);
  bool on_message(const ConnectionPointer& connection, const Message& message, UniqueFd passed);
  bool on_welcome(const ConnectionPointer& connection, const Message& welcome, UniqueFd passed);
  void on_grant(const ConnectionPointer& connection, const Message& grant, UniqueFd passed);
  void on_revoked(const ConnectionPointer& connection, uint64_t region_id);
  void ask(const ConnectionPointer& connection, const std::shared_ptr<RemoteRegion>& remote);
  void send(const ConnectionPointer& connection, const Message& message);

  void lose(const ConnectionPointer& connection, const Status& failure);
  void settle(const ConnectionPointer& connection, const std::shared_ptr<RemoteRegion>& remote,
              std::shared_ptr<const Access> access, Status refusal);

  Loop& loop_;
  CopyPool& pool_;
  const Options& options_;

  mutable std::mutex mutex_;
  std::unordered_map<uint64_t, ConnectionPointer> connections_;
  uint64_t next_id_ = 1;
  uint64_t next_request_ = 1;  // service thread only
};

}  // namespace mooncake::shm
