// Notices of peers: messages that their devices put into buffers which wait here for them.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "queue_pair.hpp"
#include "registration.hpp"

namespace mooncake::verbs {

constexpr size_t kNoticesPerPeer = 8;  // that may come without any being fetched

// Thread-safe.
class Inbox {
 public:
  Inbox(std::unique_ptr<Device>& device, const Options& options) : device_(device), options_(options) {}
  ~Inbox();

  Status open();
  ibv::Cq* cq() const { return cq_; }
  int fd() const { return channel_->fd; }

  // Buffers for what comes through one queue pair.
  class Box {
   public:
    explicit Box(uint64_t id) : id_(id) {}

   private:
    friend class Inbox;
    Status post(size_t slot);

    const uint64_t id_;
    QueuePair* qp_ = nullptr;
    std::shared_ptr<Registration> registration_;
    std::array<std::array<uint8_t, MC_NOTICE_MAX>, kNoticesPerPeer> buffers_{};
  };
  Status add(QueuePair& qp, std::unique_ptr<Box>& box);
  // When the queue pair has ended. What came through it is kept.
  void remove(std::unique_ptr<Box> box);

  size_t poll(mc_notice* notices, size_t capacity);
  // False when notices wait. Otherwise the channel becomes readable with the next one.
  bool arm();

 private:
  // With the mutex held. Without `all`, leaves with the device what there is no room for.
  void fetch(bool all);

  std::unique_ptr<Device>& device_;
  const Options& options_;
  ibv::CompChannel* channel_ = nullptr;
  ibv::Cq* cq_ = nullptr;
  size_t most_boxes_ = 0;
  std::mutex mutex_;
  bool notified_ = false;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Box*> boxes_;
  std::deque<mc_notice> notices_;
};

}  // namespace mooncake::verbs
