// One instance of the driver: everything behind an endpoint handle.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <string>

#include "mooncake_driver.h"
#include "options.hpp"
#include "support/peers/endpoint.hpp"
#include "worker.hpp"

namespace mooncake::ascend {

// Memory of this process that the engine registered.
struct Region : driver::Owned {
  using Owned::Owned;
  ~Region() override;
  Status let_go(uint64_t deadline_ns);

  Memory memory;
  uint64_t generation = 0;           // of the registrations, when this one was there
  std::shared_ptr<Worker> worker;    // knows the memory; null: it has forgotten it
  std::shared_ptr<Removal> removal;  // under way; with the mutex
  std::mutex mutex;
};

// What the owner says of a region, in the body of a grant.
struct GrantBody {
  uint64_t address;
  uint64_t generation;
  uint32_t on_device;
  uint32_t pinned;
  char engine[64];
};

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint : public driver::PeerEndpoint<Region> {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  explicit Endpoint(const Options& options);
  ~Endpoint() { close(); }
  void close();

  Status caps(mc_caps& caps) const;
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  size_t poll(mc_completion* completions, size_t capacity) {
    return completions_.poll(completions, capacity);
  }
  bool arm() { return completions_.arm(); }
  void cancel(uint64_t cookie);

 private:
  class Plan;

  Status start();
  void submit_one(const mc_op& op, const Names& names, Plan& plan);
  Status describe(const Region& region, const driver::PeerInfo& peer, driver::Offer& offer) const;
  Status open_memory(const std::shared_ptr<driver::Link>& link, const driver::Message& grant,
                     std::shared_ptr<driver::Opened>& opened);

  const Options options_;
  const std::shared_ptr<Worker> worker_;  // regions may outlive the endpoint by a moment
  std::string engine_;                    // HIXL's name of this endpoint
  bool closed_ = false;
};

}  // namespace mooncake::ascend
