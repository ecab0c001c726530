// In which order objects leave: a queue for each tenant and level. Not thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include "slots.hpp"

namespace mooncake::store {

// A policy that keeps its own order: ids are versions. What each step means is said at Policy.
class ForeignOrder {
 public:
  virtual ~ForeignOrder() = default;
  virtual void insert(uint64_t id, uint64_t key, uint64_t nbytes) = 0;
  virtual void touch(uint64_t id) = 0;
  virtual void pin(uint64_t id) = 0;
  virtual void unpin(uint64_t id) = 0;
  virtual void remove(uint64_t id) = 0;
  virtual std::optional<uint64_t> victim() = 0;
};

// Levels go one after the other: objects of ended sessions, then priority 0 to 15, then what is softly
// pinned. What is kept never goes. Within a level the oldest of all tenants goes first.
class Orders {
 public:
  static constexpr uint32_t kEnded = 0, kFirst = 1, kSoft = 17, kLevels = 18, kKept = 31;

  enum class Kind { kClock, kLru, kForeign };
  using Make = std::function<std::unique_ptr<ForeignOrder>()>;

  Orders(Slots& slots, Kind kind, Make make) : slots_(slots), kind_(kind), make_(std::move(make)) {}

  // A committed slot takes its place, the youngest one of its level; a kept one has none.
  void insert(uint32_t at);
  void touch(uint32_t at);
  // Its first lease has begun, or its last one has ended. A leased slot leaves the order once it has come to
  // its head, so that it costs nothing there, and comes back as the youngest.
  void pin(uint32_t at);
  void unpin(uint32_t at);
  void remove(uint32_t at);
  // The slot to go next, of all tenants or of one; kNoSlot when every one is leased or kept.
  uint32_t victim(std::optional<uint16_t> tenant);

 private:
  struct Queue {
    uint32_t oldest = kNoSlot, youngest = kNoSlot;
    std::unique_ptr<ForeignOrder> foreign;
  };
  using Queues = std::array<Queue, kLevels>;

  Queue& queue(uint32_t at);
  void link(uint32_t at);
  void unlink(uint32_t at);
  uint32_t head(Queue& queue);
  uint32_t oldest_of(uint32_t level, std::optional<uint16_t> tenant);

  Slots& slots_;
  const Kind kind_;
  const Make make_;
  std::vector<std::unique_ptr<Queues>> tenants_;
  std::array<uint64_t, kLevels> sizes_{};              // linked slots, or those a foreign policy has
  std::unordered_map<uint64_t, uint32_t> by_version_;  // for foreign policies only
  uint32_t stamp_ = 0;
};

}  // namespace mooncake::store
