// Notices of peers: what their devices write into places that are here for them, with an immediate that says
// so.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "poller.hpp"
#include "queue_pair.hpp"
#include "registration.hpp"

namespace mooncake::verbs {

// Thread-safe.
class Inbox {
 public:
  Inbox(const Options& options, std::unique_ptr<Device>& device, Poller& poller)
      : options_(options), device_(device), poller_(poller) {}
  ~Inbox();

  Status open();
  ibv::Cq* cq() const { return cq_; }
  int fd() const { return channel_->fd; }

  // Places for what comes through the queue pairs of one peer: kNoticesPerQp for each.
  class Box {
   public:
    uint64_t iova() const { return registration_->iova(); }
    uint32_t rkey() const { return registration_->rkey(0); }

   private:
    friend class Inbox;
    Status post(size_t qp, size_t slot);
    void take(const ibv::Wc& wc, mc_notice& notice) const;

    uint64_t id_ = 0, session_ = 0, generation_ = 0;
    std::vector<QueuePair*> qps_;  // none: they have ended
    std::vector<uint32_t> taken_;  // for each, since the peer was told
    std::vector<uint8_t> bytes_;
    std::shared_ptr<Registration> registration_;
  };
  // `box` stays null where there are as many peers as there is room for: this one will have no notices.
  Status add(uint64_t session, uint64_t generation, const std::vector<std::unique_ptr<QueuePair>>& qps,
             std::unique_ptr<Box>& box);
  // When the queue pairs have ended. What came through them is kept.
  void remove(std::unique_ptr<Box> box);

  // What is to be told to peers: their places that are free. The poller is woken when there is something.
  struct Owed {
    uint64_t session;
    Taken taken;
  };
  std::vector<Owed> owed();

  size_t poll(mc_notice* notices, size_t capacity);
  // False when notices wait. Otherwise the channel becomes readable with the next one.
  bool arm();

 private:
  // With the mutex held. Without `all`, leaves with the device what there is no room for.
  void fetch(bool all);
  void free_place(Box& box, const ibv::Wc& wc);

  const Options& options_;
  std::unique_ptr<Device>& device_;
  Poller& poller_;
  ibv::CompChannel* channel_ = nullptr;
  ibv::Cq* cq_ = nullptr;
  size_t room_ = 0;  // in the completion queue, if every place was filled
  std::mutex mutex_;
  bool notified_ = false;
  uint64_t next_id_ = 1;
  std::unordered_map<uint64_t, Box*> boxes_;
  std::deque<mc_notice> notices_;
  std::vector<Owed> owed_;
};

}  // namespace mooncake::verbs
