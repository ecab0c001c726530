// Another engine, the rails that lead to it, and its regions.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "late_writes.hpp"
#include "notices.hpp"
#include "rail.hpp"
#include "region.hpp"
#include "schedule.hpp"

namespace mooncake {

constexpr size_t kMaxRails = 64;  // one bit each in a mask

class Peer : public std::enable_shared_from_this<Peer> {
 public:
  // `channel_connection`: where notifications for it go, 0 when there is no channel.
  Peer(std::shared_ptr<Endpoints> endpoints, std::string label, uint64_t channel_connection,
       const std::vector<DriverBlob>& addresses, const RailPolicy& policy, std::shared_ptr<LateWrites> late);
  ~Peer();
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const std::vector<std::unique_ptr<Rail>>& rails() const { return rails_; }
  const std::string& label() const { return label_; }
  uint64_t channel_connection() const { return channel_connection_; }
  const RailPolicy& policy() const { return policy_; }
  Endpoint& endpoint(const Rail& rail) const { return *(*endpoints_)[rail.endpoint]; }

  const std::shared_ptr<LateWrites>& late() const { return late_; }
  // Empty when nothing can land any more; see mc_driver_v1::late_writes.
  Status late_writes(size_t rail, std::string* token);

  // The rail's connection; the first call begins it.
  Status connection(size_t rail, mc_handle* connection);

  PeerQueue queue;  // guarded by the engine's mutex
  const std::shared_ptr<NoticeTicket> ticket = std::make_shared<NoticeTicket>();

 private:
  std::shared_ptr<Endpoints> endpoints_;
  const std::string label_;
  const uint64_t channel_connection_;
  const RailPolicy& policy_;
  const std::shared_ptr<LateWrites> late_;
  std::vector<std::unique_ptr<Rail>> rails_;  // by tier
  std::mutex mutex_;
  std::vector<std::atomic<mc_handle>> connections_;  // by rail
};

class RemoteRegion : public std::enable_shared_from_this<RemoteRegion> {
 public:
  RemoteRegion(std::shared_ptr<Peer> peer, std::string name, uint64_t region_id, const uint8_t* key,
               uint64_t length, const std::vector<DriverBlob>& keys);
  ~RemoteRegion();
  RemoteRegion(const RemoteRegion&) = delete;
  RemoteRegion& operator=(const RemoteRegion&) = delete;

  const std::shared_ptr<Peer>& peer() const { return peer_; }
  uint64_t length() const { return length_; }
  const std::string& name() const { return name_; }
  std::string label() const { return "region '" + name_ + "' of " + peer_->label(); }

  // Rails that lead here, a bit each, without those that turned out not to be able to.
  uint64_t rails() const { return rails_ & ~unsupported_.load(std::memory_order_relaxed); }
  void rule_out(size_t rail) { unsupported_.fetch_or(uint64_t{1} << rail, std::memory_order_relaxed); }
  // The driver's handle for this region over a rail; the first call connects and imports the key.
  Status handle(size_t rail, mc_handle* connection, mc_handle* remote);

 private:
  std::shared_ptr<Peer> peer_;
  const std::string name_;
  const uint64_t region_id_;
  const uint64_t length_;
  uint8_t key_[MC_KEY_BYTES];
  uint64_t rails_ = 0;
  std::atomic<uint64_t> unsupported_{0};
  std::mutex mutex_;
  std::vector<std::string> blobs_;               // by rail
  std::vector<std::atomic<mc_handle>> handles_;  // by rail
};

}  // namespace mooncake
