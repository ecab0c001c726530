// Memory of this process and of peers, as the engine's drivers know it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "endpoint.hpp"

namespace mooncake {

using Endpoints = std::vector<std::unique_ptr<Endpoint>>;

// A registered range of local memory. Handles are per endpoint, 0 where the driver did not take it.
struct Region {
  explicit Region(size_t endpoints) : handles(endpoints) {}

  uint64_t id = 0;
  uint64_t address = 0;
  uint64_t length = 0;
  std::string name;
  std::vector<std::atomic<mc_handle>> handles;

  // Transfers hold the region while they run; closing waits for them.
  bool enter() {
    std::lock_guard lock(mutex);
    if (closing) return false;
    ++in_flight;
    return true;
  }
  void leave() {
    std::lock_guard lock(mutex);
    if (--in_flight == 0) idle.notify_all();
  }

  std::mutex mutex;
  std::condition_variable idle;
  uint64_t in_flight = 0;
  bool closing = false;
  std::timed_mutex closer;  // held by the one thread that gives the handles back
};

// Another engine, reached through every driver both sides have.
class Peer {
 public:
  Peer(std::shared_ptr<Endpoints> endpoints, std::string label)
      : endpoints_(std::move(endpoints)), label_(std::move(label)), connections_(endpoints_->size(), 0) {}
  ~Peer() {
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (connections_[i] != 0) (*endpoints_)[i]->disconnect(connections_[i]);
    }
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  Status add(size_t endpoint, const std::string& address) {
    return (*endpoints_)[endpoint]->connect(address, &connections_[endpoint]);
  }
  mc_handle connection(size_t endpoint) const { return connections_[endpoint]; }
  const std::string& label() const { return label_; }

 private:
  std::shared_ptr<Endpoints> endpoints_;
  std::string label_;
  std::vector<mc_handle> connections_;
};

// One way to a remote region: an endpoint and the driver's handle for the region's key.
struct Rail {
  size_t endpoint = 0;
  mc_handle remote = 0;
  std::atomic<uint64_t> paused_until_ns{0};  // after a failure; ~0 when the driver can never do it
};

// A peer's region and the rails that lead there, best first.
class RemoteRegion {
 public:
  RemoteRegion(std::shared_ptr<Endpoints> endpoints, std::shared_ptr<Peer> peer, uint64_t length,
               std::string name)
      : endpoints_(std::move(endpoints)), peer_(std::move(peer)), length_(length), name_(std::move(name)) {}
  ~RemoteRegion() {
    for (auto& rail : rails_) (*endpoints_)[rail->endpoint]->release_key(rail->remote);
  }
  RemoteRegion(const RemoteRegion&) = delete;
  RemoteRegion& operator=(const RemoteRegion&) = delete;

  Status add_rail(size_t endpoint, uint64_t region_id, const uint8_t* key, const std::string& blob) {
    auto rail = std::make_unique<Rail>();
    rail->endpoint = endpoint;
    Status status = (*endpoints_)[endpoint]->import_key(peer_->connection(endpoint), region_id, key, length_,
                                                        blob, &rail->remote);
    if (status.ok()) rails_.push_back(std::move(rail));
    return status;
  }

  const std::vector<std::unique_ptr<Rail>>& rails() const { return rails_; }
  const Peer& peer() const { return *peer_; }
  uint64_t length() const { return length_; }
  std::string label() const { return "region '" + name_ + "' of " + peer_->label(); }

 private:
  std::shared_ptr<Endpoints> endpoints_;
  std::shared_ptr<Peer> peer_;
  uint64_t length_;
  std::string name_;
  std::vector<std::unique_ptr<Rail>> rails_;
};

}  // namespace mooncake
