// A peer's endpoint as the initiator sees it. Plain data: the Initiator does the work.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "address.hpp"
#include "channel.hpp"
#include "operation.hpp"

namespace mooncake::verbs {

// A region of a peer, under one key. Guarded by the initiator's mutex.
struct Remote {
  enum class State { kUnknown, kToAsk, kAsked, kOpen, kRefused };

  Connection* connection = nullptr;
  uint64_t region_id = 0;
  Key key{};
  State state = State::kUnknown;
  bool released = false;
  uint32_t users = 0;   // operations
  ImportAnswer opened;  // what the peer answered
  Queue parked;         // operations that wait for the answer
};

// A message to the peer. It is posted when every operation before it was, to the queue pair that has those of
// them which are not over: there it arrives behind them. Where several have, it waits.
struct Notice {
  uint32_t operation;
  uint32_t waits;       // for so many to be posted
  Status failed;        // one of the writes before it has
  bool marked = false;  // they are posted, and where they end on each queue pair is known
  std::array<uint32_t, kMaxQps> marks{};
};

struct Connection : std::enable_shared_from_this<Connection> {
  enum class State {
    kIdle,      // no queue pairs
    kDialing,   // the control socket is being connected
    kGreeting,  // waits for the peer's queue pairs
    kReady,
    kBroken,  // the queue pairs must not be used, and are about to be taken down
  };

  const Address peer;
  const std::string name;  // for reasons
  Nonce session{};         // never changes

  // ---- guarded by the initiator's mutex
  State state = State::kIdle;
  Queue queue;
  uint32_t operations = 0;     // accepted and not finished
  uint32_t unposted = 0;       // of them, those that are not all with the device; without notices
  uint64_t failed_write = 0;   // the number of the completion of the last one; 0: there was none
  uint32_t epoch = 0;          // how many notices were accepted
  std::deque<Notice> notices;  // not posted yet
  uint64_t in_flight_bytes = 0;
  std::vector<std::unique_ptr<QueuePair>> qps;
  size_t next_qp = 0;
  std::unordered_map<const Remote*, std::shared_ptr<Remote>> remotes;
  std::vector<std::shared_ptr<Remote>> to_ask;  // for which the peer has to be asked
  std::unordered_map<uint64_t, std::shared_ptr<Remote>> asked;
  Status cause;                // why it is broken
  uint32_t culprit = kNone;    // the operation that the target refused, when that broke it
  bool closing = false;        // disconnect() was called
  bool visited = false;        // used since the sweep of idle connections came by
  bool wants_control = false;  // is in the list of what the control thread shall look at
  bool touched = false;        // is in the list of what is to be pumped
  bool stalled = false;        // waits for room in the completion queue
  uint32_t failures = 0;       // in a row
  uint64_t generation = 0;     // of the queue pairs
  uint64_t late = 0;           // the generation whose writes may still land; 0: none

  // ---- used by the control thread only
  std::unique_ptr<Channel> channel;
  uint64_t channel_id = 0;
  bool channel_writes = false;  // whether its descriptor is watched for room
  size_t next_host = 0;
  uint64_t deadline_ns = 0;  // of the answer that it waits for; 0: none
  uint64_t retry_ns = 0;     // not dialed before
  std::vector<std::unique_ptr<QueuePair>> fresh;
  bool timed = false;  // is in the list of those that wait for a time

  explicit Connection(Address address)
      : peer(std::move(address)), name(peer.hosts.front() + ":" + std::to_string(peer.port)) {}
};

// A copy: what is done with them may take some out of the table.
inline std::vector<std::shared_ptr<Remote>> remotes_of(const Connection& connection) {
  std::vector<std::shared_ptr<Remote>> remotes;
  for (const auto& [key, remote] : connection.remotes) remotes.push_back(remote);
  return remotes;
}

}  // namespace mooncake::verbs
