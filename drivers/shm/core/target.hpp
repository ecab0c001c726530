// The side that owns memory: it listens, checks keys, grants access, and takes it back.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "channel.hpp"
#include "host.hpp"
#include "lease.hpp"
#include "loop.hpp"
#include "options.hpp"
#include "region.hpp"

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
    UniqueFd pidfd;
    bool greeted = false;
    bool stranger = false;  // runs as a user that is not served
    std::atomic<bool> gone{false};

    std::shared_ptr<LeasePage> leases;
    std::unordered_map<uint64_t, Grant> grants;  // by region id
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
  Status grant(Peer& peer, const Message& question, Message& answer, std::shared_ptr<const UniqueFd>& fd);
  bool send(const PeerPointer& peer, const Message& message,
            std::shared_ptr<const UniqueFd> passed = nullptr);
  void drop(const PeerPointer& peer);

  void revoke_grants(uint64_t region_id, std::vector<Holder>& holders);
  void release_grants(uint64_t region_id);

  Loop& loop_;
  const Options& options_;
  const Address& address_;
  UniqueFd listener_;
  int strangers_ = 0;  // connected now; service thread only
  std::atomic<uint64_t> refused_{0};

  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> regions_;
  std::list<PeerPointer> peers_;
};

}  // namespace mooncake::shm
