// The side that owns memory: it listens, checks keys, grants access, and takes it back.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "../keys.hpp"
#include "../os.hpp"
#include "address.hpp"
#include "channel.hpp"
#include "lease.hpp"
#include "loop.hpp"

namespace mooncake::driver {

// Memory of this process that the engine registered. A driver derives its own from it.
struct Owned {
  Owned(uint64_t id, uint64_t length, const uint8_t* key) : id(id), length(length), keys(key) {}
  virtual ~Owned() = default;

  const uint64_t id;
  const uint64_t length;

 private:
  friend class Grantor;
  KeyRing keys;  // guarded by the grantor's mutex, as the next
  bool withdrawn = false;
};

// Who is at the other end of a control connection.
struct PeerInfo {
  pid_t pid = 0;  // 0: on another host, or not visible in our pid namespace
  bool same_process = false;
  bool same_host = false;
};

// One accepted connection, as a driver sees it.
struct Session {
  virtual ~Session() = default;
  PeerInfo peer;
  std::shared_ptr<void> state;  // the driver's; service thread only
};

// What a peer gets to reach a region: parts first, each with a descriptor where there is one, then the grant.
struct Offer {
  struct Part {
    Message message;
    std::shared_ptr<const UniqueFd> fd;
  };
  std::vector<Part> parts;
  Message grant = make_message(MessageKind::kGrant);
};

// What a driver does in it. All are called on the service thread.
struct GrantorHooks {
  // Puts into the offer what the peer needs.
  std::function<Status(Session&, const Owned&, uint32_t access, Offer&)> describe;
  // A message of kind kDriver; false: it breaks the rules, and the connection ends.
  std::function<bool(const std::shared_ptr<Session>&, const Message&, UniqueFd passed)> on_message;
};

// Thread-safe.
class Grantor {
 public:
  struct Settings {
    double answer_timeout_s;
    bool allow_other_users;
    bool listen_tcp;  // at the address' host; the port is filled in
  };
  Grantor(Loop& loop, Settings settings, Address& address, GrantorHooks hooks)
      : loop_(loop), settings_(settings), address_(address), hooks_(std::move(hooks)) {}

  Status listen();
  // Withdraws every region and waits a moment for the peers to let go.
  void close();

  // MC_INVALID when the region id is taken.
  Status add(const std::shared_ptr<Owned>& region);
  // No new grant from now on; returns once every peer let go. MC_TIMEOUT: one has not; call again.
  Status withdraw(const std::shared_ptr<Owned>& region, uint64_t deadline_ns);
  Status grant(const std::shared_ptr<Owned>& region, const uint8_t* key, uint32_t access);
  // Null: every key. At the same host no operation begins once this is called; at others, once they have
  // heard of it. A deadline of 0 does not wait for those that had begun.
  Status revoke(const std::shared_ptr<Owned>& region, const uint8_t* key, uint64_t deadline_ns);

  // For operations that a driver carries out at the owner. Null with the reason when the grant does not hold
  // (any more), does not allow it, or the range is not inside the region.
  std::shared_ptr<Owned> check(const Session& session, uint64_t grant, uint32_t access, uint64_t offset,
                               uint64_t length, Status& refusal);
  // On the service thread. False when the connection has ended.
  bool send(const std::shared_ptr<Session>& session, const Message& message,
            std::shared_ptr<const UniqueFd> passed = nullptr);

  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  struct Grant {
    std::shared_ptr<Owned> region;
    Key key;
    uint32_t access;
    uint32_t slot = 0;  // of the lease; of peers at the same host
    bool revoked = false;
  };
  struct Peer : Session {
    std::unique_ptr<Channel> channel;
    UniqueFd pidfd;
    std::string name;  // for messages
    bool tcp = false;
    bool greeted = false;
    bool stranger = false;  // runs as a user that is not served
    bool closed = false;    // the socket is not used any more
    bool gone = false;      // nothing of it touches our memory
    // With the mutex.
    std::map<uint64_t, Grant> grants;
    std::shared_ptr<LeasePage> leases;  // null: at another host
    uint32_t slots_used = 0;
    std::vector<uint32_t> free_slots;
  };
  using PeerPointer = std::shared_ptr<Peer>;

  Status listen_unix();
  Status listen_tcp();
  void watch_listener(int fd, bool tcp);
  void on_listener(int fd, bool tcp);
  void welcome_socket(UniqueFd socket, bool tcp);
  void on_event(const PeerPointer& peer, uint32_t epoll_events);
  bool on_message(const PeerPointer& peer, const Message& message, UniqueFd passed);
  bool on_hello(const PeerPointer& peer, const Message& hello);
  bool on_ask(const PeerPointer& peer, const Message& question);
  Status answer_for(Peer& peer, const Message& question, Offer& offer);
  void on_release(Peer& peer, uint64_t grant);
  // The socket has ended or the peer broke the rules; its mappings last until its process ends.
  void hang_up(const PeerPointer& peer);
  void gone(const PeerPointer& peer);

  // With the mutex held. Null: every key.
  static Status lease(Peer& peer, Grant& grant, Message& answer);
  static void end_lease(Peer& peer, const Grant& grant);
  void revoke_grants(const Owned& region, const Key* key);
  // MC_TIMEOUT names who holds it.
  Status wait(const Owned& region, const Key* key, uint64_t deadline_ns, std::unique_lock<std::mutex>& lock);

  Loop& loop_;
  const Settings settings_;
  Address& address_;
  const GrantorHooks hooks_;
  UniqueFd unix_listener_;
  UniqueFd tcp_listener_;
  int strangers_ = 0;  // connected now; service thread only
  uint64_t next_grant_ = 1;
  std::atomic<uint64_t> refused_{0};

  std::mutex mutex_;
  std::condition_variable released_;
  std::unordered_map<uint64_t, std::shared_ptr<Owned>> regions_;
  std::list<PeerPointer> peers_;
};

}  // namespace mooncake::driver
