// Which id goes next. Not thread-safe.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "nodes.hpp"
#include "policy.hpp"

namespace mooncake::store {

// Ids, their pins and a policy. A pinned id is never the victim. It leaves the policy's order once it has
// come to its head, so that pinned ids cost nothing there, and comes back with its last unpin.
class EvictionQueue {
 public:
  // Null when there is no policy of that name.
  static std::unique_ptr<EvictionQueue> make(std::string_view policy);

  size_t size() const { return nodes_.size(); }
  bool contains(uint64_t id) const { return nodes_.find(id) != kNone; }

  // Each returns whether it could: insert wants an id that is not there, the others one that is, and unpin
  // one that is pinned.
  bool insert(uint64_t id, uint64_t key, uint64_t nbytes);
  bool touch(uint64_t id);
  bool pin(uint64_t id);
  bool unpin(uint64_t id);
  // Of the last victim it is an eviction, from which policies learn.
  bool remove(uint64_t id);

  // The id to go next, which stays until it is removed; none when every id is pinned.
  std::optional<uint64_t> victim();

 private:
  EvictionQueue() = default;

  Nodes nodes_;
  std::unique_ptr<Policy> policy_;
  std::optional<uint64_t> last_victim_;
};

}  // namespace mooncake::store
