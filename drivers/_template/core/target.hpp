// The side that owns memory: it listens and serves the requests of peers.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <list>
#include <mutex>
#include <thread>

#include "regions.hpp"
#include "support/os.hpp"

struct sockaddr_un;

namespace template_driver {

using mooncake::driver::UniqueFd;

// What a peer needs to find an endpoint: a random socket name, so that a restarted process is never taken for
// this one. It lies in no file system: nothing is left of it after a crash. Real hardware: device, port,
// queue pair, ...
using Address = std::array<uint8_t, 16>;
unsigned fill_socket_address(const Address& address, sockaddr_un* out);

// With hardware that reads and writes remote memory by itself, there is no thread here: only registration.
class Target {
 public:
  explicit Target(Regions& regions) : regions_(regions) {}
  ~Target();
  Status listen();

  const Address& address() const { return address_; }
  uint64_t refused() const { return refused_; }
  // Ends what serves this session; true once none of it can touch memory any more. Real hardware: move the
  // queue pair to its error state, or whatever else stops what is on its way.
  bool end_session(uint64_t session, uint64_t deadline_ns) {
    return end_session(session, nullptr, deadline_ns);
  }

 private:
  struct Peer {
    UniqueFd socket;
    uint64_t session = 0;            // of its first request; guarded by `mutex_`
    std::atomic<bool> ended{false};  // by end_session()
    std::atomic<bool> done{false};
    std::thread thread;
  };
  void accept_peers();
  bool begin(UniqueFd socket);
  void serve(Peer& peer);
  bool serve_one(Peer& peer, const Request& request);
  bool enter(Peer& peer, uint64_t session);
  bool end_session(uint64_t session, const Peer* except, uint64_t deadline_ns);

  Regions& regions_;
  Address address_{};
  UniqueFd listener_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> refused_{0};
  std::thread acceptor_;
  std::mutex mutex_;
  std::condition_variable gone_;  // a peer is done
  std::list<Peer> peers_;
};

}  // namespace template_driver
