// The ids of an eviction queue, and lists of them without allocation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

namespace mooncake::store {

inline constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

// One id. What stands below the pins belongs to the policy.
struct Node {
  uint64_t id;
  uint64_t key;
  uint64_t nbytes;
  uint32_t pins = 0;
  bool parked = false;  // pinned, and out of the policy's order

  uint8_t list = 0;
  uint32_t uses = 0;
  uint32_t previous = kNone;
  uint32_t next = kNone;
  uint64_t stamp = 0;
  double rank = 0;
};

// Nodes by position, which stays the same for a node's life, and by id.
class Nodes {
 public:
  Node& operator[](uint32_t at) { return nodes_[at]; }
  size_t size() const { return by_id_.size(); }

  uint32_t find(uint64_t id) const {
    auto found = by_id_.find(id);
    return found == by_id_.end() ? kNone : found->second;
  }

  uint32_t add(const Node& node) {
    uint32_t at;
    if (free_.empty()) {
      at = static_cast<uint32_t>(nodes_.size());
      nodes_.push_back(node);
    } else {
      at = free_.back();
      free_.pop_back();
      nodes_[at] = node;
    }
    by_id_.emplace(node.id, at);
    return at;
  }

  void remove(uint32_t at) {
    by_id_.erase(nodes_[at].id);
    free_.push_back(at);
  }

 private:
  std::vector<Node> nodes_;
  std::vector<uint32_t> free_;
  std::unordered_map<uint64_t, uint32_t> by_id_;
};

// A queue through the nodes' own links; a node is in one at most.
class List {
 public:
  explicit List(Nodes& nodes) : nodes_(nodes) {}
  uint32_t oldest() const { return first_; }
  size_t size() const { return size_; }

  void push_young(uint32_t at) {
    nodes_[at].previous = last_;
    nodes_[at].next = kNone;
    (last_ == kNone ? first_ : nodes_[last_].next) = at;
    last_ = at;
    ++size_;
  }

  void erase(uint32_t at) {
    Node& node = nodes_[at];
    (node.previous == kNone ? first_ : nodes_[node.previous].next) = node.next;
    (node.next == kNone ? last_ : nodes_[node.next].previous) = node.previous;
    --size_;
  }

  void make_young(uint32_t at) {
    erase(at);
    push_young(at);
  }

 private:
  Nodes& nodes_;
  uint32_t first_ = kNone;
  uint32_t last_ = kNone;
  size_t size_ = 0;
};

}  // namespace mooncake::store
