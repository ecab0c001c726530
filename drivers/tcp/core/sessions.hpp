// The target's side of the fence: of each lane of each initiator only the newest connection applies bytes.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fence_token.hpp"
#include "wire.hpp"

namespace mooncake_tcp {

class Incoming;

// Connections that said hello and may still apply bytes. From any thread.
class Sessions {
 public:
  // Enters the sender of `hello`; `older` are the connections it takes the place of, which stay entered until
  // they leave. False when a newer one of the same lane is there.
  bool enter(const Header& hello, const std::shared_ptr<Incoming>& connection,
             std::vector<std::shared_ptr<Incoming>>* older);
  // Those that the token names, and older ones of the same lanes.
  std::vector<std::shared_ptr<Incoming>> named(const FenceToken& token);
  // The connection is closed. It need not have been entered.
  void leave(const Header& hello, const Incoming* connection);

 private:
  struct Entry {
    uint64_t generation;
    const Incoming* connection;
    std::weak_ptr<Incoming> owner;
  };
  using Lane = std::pair<uint64_t, uint16_t>;  // session and number

  std::mutex mutex_;
  std::map<Lane, std::vector<Entry>> lanes_;
};

}  // namespace mooncake_tcp
