// The side that owns memory: it listens, checks keys, grants access, and takes it back.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "life.hpp"
#include "options.hpp"
#include "os.hpp"
#include "region.hpp"
#include "wire.hpp"

namespace mooncake::shm {

// Thread-safe.
class Target {
 public:
  Target(Loop& loop, const Options& options, const Address& address)
      : loop_(loop), options_(options), address_(address) {}

  Status listen();
  // Withdraws every region and waits a moment for copies in flight; then no peer touches this process's
  // memory, unless one was stopped in mid-copy for longer than that.
  void close();

  // MC_INVALID when the region id is taken.
  Status add(const std::shared_ptr<Region>& region);
  // No new copy begins once this is called. MC_TIMEOUT: copies were still in flight at the deadline; call
  // again.
  Status withdraw(const std::shared_ptr<Region>& region, uint64_t deadline_ns);
  // Adds a key with lesser rights. Who only reads gets a descriptor that cannot be mapped for writing.
  Status grant(const std::shared_ptr<Region>& region, const Key& key, uint32_t access);
  // No new copy under the key begins once this is called; null: under any key. A deadline of 0 waits for
  // none.
  Status revoke(const std::shared_ptr<Region>& region, const uint8_t* key, uint64_t deadline_ns);

  uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  struct Grant {
    uint32_t slot;
    uint32_t token;
    bool revoked = false;
  };
  // One accepted connection. Channel and greeting belong to the service thread, the rest to mutex_.
  struct Peer {
    std::unique_ptr<Channel> channel;
    pid_t pid = 0;  // 0: not visible in our pid namespace
    UniqueFd pidfd;
    bool greeted = false;
    bool stranger = false;  // runs as a user that is not served
    bool turned_away = false;
    std::atomic<bool> gone{false};  // no copy of its is in flight any more

    std::shared_ptr<LeasePage> leases;
    std::map<std::pair<uint64_t, Key>, Grant> grants;  // by region id and key
    uint32_t slots_used = 0;
    std::vector<uint32_t> free_slots;
  };
  using PeerPointer = std::shared_ptr<Peer>;
  // A copy that may be in flight: where to look, and whose.
  struct Holder {
    PeerPointer peer;
    uint32_t slot;
  };

  // On the service thread.
  void on_listener();
  void welcome_socket(UniqueFd socket);
  void on_event(const PeerPointer& peer, uint32_t epoll_events);
  bool on_message(const PeerPointer& peer, const Message& message);
  bool on_hello(const PeerPointer& peer, const Message& hello);
  bool on_ask(const PeerPointer& peer, const Message& question);
  Status answer_for(Peer& peer, const Message& question, Message& answer,
                    std::shared_ptr<const UniqueFd>& fd);
  static void reclaim(Peer& peer);
  static Status lease(Peer& peer, const std::pair<uint64_t, Key>& name, Grant& grant);
  bool send(const PeerPointer& peer, const Message& message,
            std::shared_ptr<const UniqueFd> passed = nullptr);
  // The peer's process or its end of the connection has ended.
  void drop(const PeerPointer& peer);
  // It lives, but broke the rules: its leases end, and it counts as gone when its copies are over.
  void turn_away(const PeerPointer& peer);
  void wait_for_last_copy(const PeerPointer& peer);

  // With the mutex held. A null key stands for every key.
  void revoke_grants(uint64_t region_id, const Key* key, std::vector<Holder>& holders);
  void release_grants(uint64_t region_id, const Key* key);

  // Without the mutex. Those whose copies go on at the deadline.
  static std::vector<PeerPointer> wait_for(const std::vector<Holder>& holders, uint64_t deadline_ns);

  Loop& loop_;
  const Options& options_;
  const Address& address_;
  UniqueFd listener_;
  std::shared_ptr<LifeSign> life_;
  std::shared_ptr<const UniqueFd> life_fd_;
  int strangers_ = 0;  // connected now; service thread only
  std::atomic<uint64_t> refused_{0};

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> regions_;
  std::list<PeerPointer> peers_;
};

}  // namespace mooncake::shm
