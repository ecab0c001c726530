// Writes to one peer process that are over while bytes of them may still land there, and the fence against
// those: see "Late writes" in mooncake_driver.h.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "status.hpp"

namespace mooncake {

class Peer;

// Shared by all that this engine has made of one incarnation of a peer. Thread-safe.
class LateWrites {
 public:
  static constexpr uint64_t kAllRails = ~uint64_t{0};

  // What the peer is to fence: a token for its endpoint of that driver and device.
  struct Order {
    uint64_t way;
    uint64_t failures;  // of the way when the token was made: later ones need another
    std::string driver;
    std::string device;
    std::string token;
  };

  LateWrites(std::string address, uint64_t epoch) : address(std::move(address)), epoch(epoch) {}

  const std::string address;
  const uint64_t epoch;

  // Costs nothing, for every write asks.
  bool any() const { return any_.load(std::memory_order_relaxed); }
  // A write over a rail of the peer has failed. `broken`: the connection is known to be.
  void note(Peer& peer, size_t rail, bool broken);
  // The peer's connections go, what they carried stays.
  void orphan(Peer& peer);
  // The rails that writes may take now: all when nothing is late (any more), the only one on which something
  // is, because its driver keeps the order there, or none.
  uint64_t open_rails(Peer& peer, uint64_t now_ns);

  // True once the peer should be asked to fence, and once for every such question.
  bool ask(uint64_t now_ns);
  std::vector<Order> orders();
  // The answer to ask(): what is fenced, or why it is not.
  void answered(const Status& status);
  // These orders have been carried out.
  void fenced(const std::vector<Order>& orders);
  uint64_t failed_questions() const;
  // What stands in the way of a write, for a message.
  std::string explain() const;

 private:
  // A connection of this engine.
  struct Way {
    uint64_t id;
    Peer* peer;  // null: it was disconnected, and `token` says what it was
    size_t rail;
    std::string driver;
    std::string device;
    std::string label;
    std::string token;
    uint64_t failures;
    bool broken;
    uint64_t since_ns;
  };

  void refresh();

  std::atomic<bool> any_{false};
  mutable std::mutex mutex_;  // what follows
  std::vector<Way> ways_;
  uint64_t next_id_ = 1;
  uint64_t refreshed_ns_ = 0;
  bool asking_ = false;
  uint64_t failed_ = 0;
  std::string failure_;
};

}  // namespace mooncake
