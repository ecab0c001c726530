// Accepts connections of peers and spreads them over the workers.
#pragma once

#include <memory>
#include <vector>

#include "address.hpp"
#include "incoming.hpp"
#include "options.hpp"
#include "worker.hpp"

namespace mooncake_tcp {

class Listener final : public Watched {
 public:
  Listener(std::vector<std::unique_ptr<Worker>>& workers, const Options& options, const Key& nonce,
           RegionTable& regions, Counters& counters, Sessions& sessions)
      : workers_(workers),
        options_(options),
        nonce_(nonce),
        regions_(regions),
        counters_(counters),
        sessions_(sessions) {}

  // Takes the first free port of the range.
  Status open();
  const SocketAddress& bound() const { return bound_; }
  // On the first worker's thread.
  void begin();

  void on_events(uint32_t events) override;
  void on_deadline() override;
  void on_stop() override;

 private:
  Status listen_on(const SocketAddress& address, int* error);

  std::vector<std::unique_ptr<Worker>>& workers_;
  const Options& options_;
  const Key& nonce_;
  RegionTable& regions_;
  Counters& counters_;
  Sessions& sessions_;
  Descriptor socket_;
  SocketAddress bound_;
  uint64_t token_ = 0;
  size_t next_worker_ = 0;
};

}  // namespace mooncake_tcp
