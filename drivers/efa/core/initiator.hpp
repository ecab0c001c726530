// This side of connections to peers: sessions, the asking for regions, and the posting of operations.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <vector>

#include "shared.hpp"
#include "support/keys.hpp"

namespace mooncake::efa {

using driver::Key;

constexpr size_t kMostMore = 16;  // operations behind one doorbell

// A peer's region as this side knows it.
struct Remote {
  enum class State : uint8_t { kUnasked, kAsked, kOpen, kRefused };

  // Constant.
  Connection* connection = nullptr;
  uint64_t number = 0;
  uint64_t region = 0;
  Key key{};

  State state = State::kUnasked;
  bool released = false;  // its handle was given back
  bool owes = false;      // the owner waits for the last operation
  uint64_t grant = 0;
  uint64_t memory_key = 0;
  uint64_t base = 0;
  uint64_t length = 0;
  uint32_t access = 0;
  uint32_t users = 0;   // operations that name it
  uint32_t posted = 0;  // those that the fabric has
  Status refusal;
  OperationQueue waiting;  // for the session or the answer

  // Whether the owner would; it, or its device, looks again.
  bool allows(mc_opcode opcode, uint64_t at, uint64_t bytes) const {
    uint32_t needed = opcode == MC_READ ? MC_ACCESS_READ : MC_ACCESS_WRITE;
    return (access & needed) != 0 && at <= length && bytes <= length - at;
  }
};

// The writes between two notices. The fabric reorders, so a notice says how many they are, and each carries
// the epoch's number as data of its completion at the target.
struct Epoch {
  uint64_t number = 0;
  bool counted = false;  // else the notice waits here until all of them are over
  bool closed = false;   // by a notice
  bool sent = false;
  bool awaited = false;     // its notice has not completed yet
  uint32_t writes = 0;      // accepted
  uint32_t unfinished = 0;  // of them
  uint64_t cookie = 0;
  FabricAddress data;
  Status failure;  // of the first of them that failed
};

// Outlives its sessions: the first operation begins one, and after a loss the next operation another.
struct Connection {
  enum class State : uint8_t { kDown, kWanted, kConnecting, kReady, kParting, kClosed };

  Address address{};
  State state = State::kDown;

  // Of the session.
  Link* link = nullptr;
  fi::Address door = fi::kAddressUnspecified;
  fi::Address peer = fi::kAddressUnspecified;
  uint64_t number = 0;  // ours
  uint64_t guest = 0;   // the peer's
  Name session{};
  Sequencer sequencer;
  uint64_t began_ns = 0;
  uint64_t heard_ns = 0;
  uint64_t pinged_ns = 0;
  uint64_t parting_ns = 0;    // since when the peer waits for the farewell
  uint64_t cancelled_ns = 0;  // since when posted operations are to end early; 0: none
  uint32_t posted = 0;
  OperationQueue backlog;  // may be posted as soon as the fabric has room

  uint32_t slot = 0;         // the peer's number of the session in the data of writes
  std::deque<Epoch> epochs;  // the last one is open; empty until the first notice or write

  Name late{};  // an earlier session whose writes may land yet; zeros: none
  std::unordered_map<uint64_t, std::shared_ptr<Remote>> remotes;
  std::unordered_map<uint64_t, std::shared_ptr<Remote>> asked;  // by Message::request
};

// With the lock held, all of it.
class Initiator {
 public:
  explicit Initiator(Shared& shared)
      : shared_(shared), links_(shared.fabric, shared.options.endpoints, false) {}

  std::shared_ptr<Connection> connect(const Address& address);
  void disconnect(const std::shared_ptr<Connection>& connection);
  void close();

  std::shared_ptr<Remote> import(Connection& connection, uint64_t region, const Key& key);
  void release(const std::shared_ptr<Remote>& remote);

  // Takes over an operation whose members are set. `more`: another one follows at once that will be posted to
  // the same link, and rings for both. (Where that one finds no room, it rings from the backlog.)
  void place(Operation& operation, bool more);
  void cancel(uint64_t cookie);
  void notify(Connection& connection, const void* data, size_t length, uint64_t cookie);

  // On the thread that makes progress.
  void on_message(const Message& message);
  void on_transfer(Token& token, const Status* failure);
  void on_lost_send(Token& token, const Status& failure);
  // Begins sessions that are wanted, posts what waits for room.
  void advance();
  void tick(uint64_t now);

  // What a fabric's error code is in the ABI.
  static mc_status code_of(int error);
  bool wanted() const { return wanted_; }
  bool stalled() const;
  bool has_connections() const { return !connections_.empty(); }
  uint32_t ready() const;
  // Whether peers have yet to answer to the goodbye of a connection that was closed.
  bool is_parting() const { return !parting_.empty(); }
  Links& links() { return links_; }

 private:
  using ConnectionPointer = std::shared_ptr<Connection>;

  void begin(Connection& connection);
  Status greet(Connection& connection);
  void on_farewell(const Message& message);
  void on_welcome(Connection& connection, const Message& message);
  bool handle(Connection& connection, const Message& message);
  void on_answer(Connection& connection, const Message& message);
  void on_revoked(Connection& connection, const Message& message);
  void ask(Connection& connection, const std::shared_ptr<Remote>& remote);
  void send(Connection& connection, Message message);
  ssize_t post(Operation& operation, bool more);
  void pump(Connection& connection);
  void finish(Operation& operation, const Status* failure);
  void fail_all(OperationQueue& queue, const Status& failure);
  void settle(Remote& remote);
  void tell_released(Connection& connection, uint64_t grant);
  void refuse(Remote& remote, const Status& refusal);
  // Ends the session; what it had fails, and a new operation begins another one.
  void lose(Connection& connection, const Status& failure, bool at_once = false);
  void part(Connection& connection);
  void abandon(Link& link, const Status& failure);
  void end_operations(Connection& connection, const Status& failure);
  Epoch& open_epoch(Connection& connection);
  void send_notices(Connection& connection);
  void end_notice(Epoch& epoch, const Status* failure);
  void fail_notices(Connection& connection, const Status& failure);
  void on_noticed(Connection& connection, const Message& message);
  void forget_epochs(Connection& connection);
  void look_after(Connection& connection, uint64_t now);

  Shared& shared_;
  Links links_;
  std::unordered_map<Connection*, ConnectionPointer> connections_;
  std::unordered_map<uint64_t, Connection*> sessions_;  // by number
  std::unordered_map<uint64_t, Link*> parting_;         // by number
  std::atomic<bool> wanted_{false};
};

}  // namespace mooncake::efa
