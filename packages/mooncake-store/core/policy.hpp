// In which order ids are offered for eviction. The queue above keeps ids and pins; a policy keeps the order.
#pragma once

#include <memory>
#include <string_view>

#include "nodes.hpp"

namespace mooncake::store {

class Policy {
 public:
  virtual ~Policy() = default;

  // A new node takes its place.
  virtual void insert(uint32_t at) = 0;
  // One use of a node; a parked one is in no order now, and its use counts once it is back.
  virtual void touch(uint32_t at) = 0;
  // A node leaves the order: for good, or as long as it is parked.
  virtual void leave(uint32_t at) = 0;
  // A parked node comes back: it has just been used.
  virtual void come_back(uint32_t at) = 0;
  // The node to go next, kNone when the order is empty.
  virtual uint32_t oldest() = 0;
  // Whether the oldest one, which is not pinned, is let off this time; it then is not the oldest any more.
  virtual bool spare(uint32_t) { return false; }
  // The node is going to leave for good, because it was the victim.
  virtual void evicted(uint32_t) {}
};

// A policy by its name: clock, lru, arc or gdsf; null when there is none of that name.
std::unique_ptr<Policy> make_policy(std::string_view name, Nodes& nodes);

std::unique_ptr<Policy> make_arc(Nodes& nodes);
std::unique_ptr<Policy> make_gdsf(Nodes& nodes);

}  // namespace mooncake::store
