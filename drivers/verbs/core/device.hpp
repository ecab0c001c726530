// One port of one RDMA device, opened: its protection domain and its completion queue.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "gid.hpp"
#include "library.hpp"
#include "options.hpp"

namespace mooncake::verbs {

// What peers must know of a port to reach it.
struct PortAddress {
  ibv::Gid gid{};
  int gid_index = 0;
  uint16_t lid = 0;
  bool ethernet = false;
  int mtu = 0;  // as verbs numbers them: 1 is 256 bytes, 5 is 4096
};

class Device {
 public:
  static Status open(const Options& options, std::unique_ptr<Device>& device);
  ~Device();
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // Asks the port anew: addresses and state change while it is open. MC_IO with the reason when it is down.
  Status look(PortAddress& address) const;
  // Turns pending events into facts: whether the device still works. Never waits.
  void read_events();
  // Takes the events of a completion channel, and whether there were any.
  bool take_events(ibv::CompChannel* channel) const;
  bool lost() const { return lost_.load(std::memory_order_relaxed); }

  const Verbs& verbs() const { return verbs_; }
  const std::string& name() const { return name_; }
  int port() const { return port_; }
  ibv::Context* context() const { return context_; }
  ibv::Pd* pd() const { return pd_; }
  ibv::Cq* cq() const { return cq_; }
  ibv::CompChannel* channel() const { return channel_; }
  int async_fd() const { return context_->async_fd; }
  const ibv::DeviceAttr& limits() const { return limits_; }
  uint32_t max_message() const { return max_message_; }
  uint64_t bandwidth() const { return bandwidth_; }

  // A range of device addresses that no registration of this endpoint had before, so that a key that has
  // ended can never open what comes after it. Equal to `address` modulo 1 GiB, which keeps large pages large.
  uint64_t take_iova(uint64_t address, uint64_t length);

 private:
  explicit Device(const Verbs& verbs) : verbs_(verbs) {}
  Status find(const Options& options);
  Status open_port(ibv::Device* device, const Options& options);
  Status prepare(const Options& options);

  const Verbs& verbs_;
  std::string name_;
  int port_ = 0;
  int wanted_gid_ = -1;
  int wanted_mtu_ = 0;
  ibv::Context* context_ = nullptr;
  ibv::Pd* pd_ = nullptr;
  ibv::CompChannel* channel_ = nullptr;
  ibv::Cq* cq_ = nullptr;
  ibv::DeviceAttr limits_{};
  uint32_t max_message_ = 0;
  uint64_t bandwidth_ = 0;
  std::atomic<bool> lost_{false};
  std::atomic<uint64_t> next_iova_{0};
};

}  // namespace mooncake::verbs
