// The side that owns memory: it answers who asks for regions, and takes them back.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <unordered_map>
#include <vector>

#include "shared.hpp"
#include "support/keys.hpp"

namespace mooncake::efa {

using driver::Key;

// One key of a region, with a registration of its own: the fabric enforces its rights and its end.
struct Grant {
  uint64_t number = 0;  // never used again
  Key key{};
  uint32_t access = 0;
  MemoryRegion memory;
  bool revoked = false;
};

struct Region {
  // Constant.
  mc_memory memory{};
  MemoryRegion local;  // for operations of this side, where the fabric wants one

  std::vector<std::unique_ptr<Grant>> grants;  // the region's own key first
  bool withdrawn = false;
};

class Target {
 public:
  explicit Target(Shared& shared) : shared_(shared), links_(shared.fabric, shared.options.endpoints, true) {}

  Status open();
  void close();
  const FabricAddress& door() const { return door_->address(); }
  const Name& name() const { return name_; }

  // These take the lock by themselves.
  Status add(const std::shared_ptr<Region>& region);
  Status grant(Region& region, const uint8_t* key, uint32_t access);
  // Null: every key. Waits until no peer has anything in flight under it, but for a deadline of 0.
  Status revoke(Region& region, const uint8_t* key, uint64_t deadline_ns);
  Status withdraw(Region& region, uint64_t deadline_ns);
  // Ends a session, whether its initiator knows or not: nothing of it lands once this returns.
  void end(const Name& session);

  // With the lock held, on the thread that makes progress.
  void on_message(Link& link, const Message& message);
  void on_lost_send(Token& token);
  void advance();
  void tick(uint64_t now);
  bool is_door(const Link& link) const { return &link == door_.get(); }
  bool stalled() const { return door_->stalled() || links_.stalled(); }

  uint64_t refused() const { return refused_; }
  // A write with this data has become visible.
  void on_data(uint64_t data);
  size_t poll_notices(mc_notice* notices, size_t capacity);
  bool has_notices() const { return !notices_.empty(); }
  bool lingering() const { return links_.lingering(); }
  void say_goodbye();
  bool has_guests() const { return !guests_.empty(); }

 private:
  // Of one epoch of a session's writes.
  struct Arrival {
    uint64_t seen = 0;      // writes whose data has arrived
    uint64_t expected = 0;  // as the notice says
    bool announced = false;
    bool dropped = false;
    FabricAddress data;
  };
  // A session of a peer that uses memory of this side.
  struct Guest {
    Link* link = nullptr;
    fi::Address peer = fi::kAddressUnspecified;
    FabricAddress address;   // the same, as it was told
    uint64_t number = 0;     // ours
    uint64_t initiator = 0;  // the peer's
    Name session{};
    Sequencer sequencer;
    uint64_t heard_ns = 0;
    uint32_t slot = 0;                     // its number in the data of writes
    uint64_t next_epoch = 0;               // whose notice is the next to be delivered
    std::map<uint64_t, Arrival> arrivals;  // by epoch, from next_epoch on
    std::set<uint64_t> grants;             // that it was given
    std::set<uint64_t> returning;          // revoked; it may have operations in flight yet
    uint64_t returning_ns = 0;             // since when there is one
  };
  using Guests = std::unordered_map<uint64_t, std::unique_ptr<Guest>>;

  std::unique_lock<std::mutex> lock_to_register();
  void on_notice(Guest& guest, const Message& message);
  void deliver(Guest& guest);
  void on_hello(const Message& hello);
  Status welcome(const Message& hello);
  void turn_away(const Message& hello, const Status& why);
  bool handle(Guest& guest, const Message& message);
  void on_ask(Guest& guest, const Message& question);
  const Grant* find(const Message& question, Region*& region, std::string& why);
  void send(Guest& guest, Message message);
  // Its operations have ended by themselves.
  void leave(Guest& guest, bool at_once);
  // Closes the link under it, and so ends the others on it, too.
  void expel(Link& link);
  void end_with_lock(const Name& session);
  // Who may have operations in flight under a revoked key of it.
  std::vector<const Guest*> returning(const Region& region) const;
  void close_returned();

  Shared& shared_;
  Links links_;
  std::unique_ptr<Link> door_;
  Name name_{};
  std::condition_variable changed_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> regions_;  // by id
  Guests guests_;
  std::vector<Guest*> slots_;  // null where free
  std::deque<mc_notice> notices_;
  uint64_t refused_ = 0;
};

}  // namespace mooncake::efa
