// The engine: drivers, regions, peers, and the thread that keeps transfers going.
#pragma once

#include <unistd.h>

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_set>
#include <vector>

#include "transfer.hpp"

namespace mooncake {

// A blob of driver `endpoint` that travels in a descriptor or handshake.
struct DriverBlob {
  size_t endpoint;
  std::string blob;
};

// One run of contiguous bytes: local offset, remote offset, length.
struct Block {
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
};

class Engine {
 public:
  Engine();
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Before start(): drivers in order of preference.
  Status add_driver(const mc_driver_v1* table, const std::string& name, const Endpoint::Options& options);
  Status start();
  // Ends every transfer with kClosed. Safe to call twice, and while other threads wait.
  void close();

  const Endpoints& endpoints() const { return *endpoints_; }
  Status export_addresses(std::vector<DriverBlob>* addresses);

  Status register_region(mc_memory memory, const std::string& name, std::shared_ptr<Region>* region);
  Status export_keys(const Region& region, std::vector<DriverBlob>* keys);
  Status close_region(Region& region, uint64_t deadline_ns);

  Status add_peer(const std::string& label, const std::vector<DriverBlob>& addresses,
                  std::shared_ptr<Peer>* peer);
  Status import_region(std::shared_ptr<Peer> peer, const std::string& name, uint64_t region_id,
                       const uint8_t* key, uint64_t length, const std::vector<DriverBlob>& keys,
                       std::shared_ptr<RemoteRegion>* remote);

  Status submit(mc_opcode opcode, std::shared_ptr<Region> local, std::shared_ptr<RemoteRegion> remote,
                const Block* blocks, size_t count, std::shared_ptr<Transfer>* transfer);
  void cancel(Transfer& transfer);
  // Helps along for a moment on the caller's thread, which saves the wake-up of the progress thread.
  void spin(const Transfer& transfer);

 private:
  // Operations [begin, end) of a transfer that no driver has taken yet.
  struct Pending {
    std::shared_ptr<Transfer> transfer;
    size_t begin;
    size_t end;
  };

  void run();
  size_t poll(bool wait_for_turn);
  bool arm_all();
  void drain_backlog();
  void wake();

  Status build_ops(Transfer& transfer, mc_opcode opcode, const Block* blocks, size_t count);
  // Submits operations [begin, end), all routed to one rail; returns where it stopped for lack of room.
  size_t submit_range(Transfer& transfer, size_t begin, size_t end);
  // Chooses a rail not yet tried for the operation; false when none is left.
  bool route(Transfer& transfer, OpState& state);
  void on_completion(const mc_completion& completion);
  void on_failure(Transfer& transfer, OpState& state, Status status);
  void finish(Transfer& transfer, uint64_t ops);

  std::shared_ptr<Endpoints> endpoints_ = std::make_shared<Endpoints>();
  std::mutex mutex_;  // active_ and backlog_
  std::unordered_set<std::shared_ptr<Transfer>> active_;
  std::deque<Pending> backlog_;
  std::atomic<bool> closing_{false};
  std::once_flag closed_;
  int wake_fd_ = -1;
  int epoll_fd_ = -1;
  std::thread progress_;
  const pid_t owner_ = getpid();
};

}  // namespace mooncake
