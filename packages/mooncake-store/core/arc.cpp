// ARC (Megiddo and Modha, FAST 2003): ids used once and ids used again in two queues, and the keys that each
// has lost lately. A key that comes back after its queue has lost it says that this queue should have been
// longer.
//
// Two things differ from the paper, because a store has bytes and not places, and evicts before it inserts:
// the capacity is the number of ids that were there when the last one was evicted, and what a lost key
// teaches has an effect from the next eviction on.
#include <algorithm>
#include <list>
#include <unordered_map>

#include "policy.hpp"

namespace mooncake::store {

namespace {

enum : uint8_t { kOnce, kAgain };

// Keys that one of the queues has lost, oldest first.
class Lost {
 public:
  size_t size() const { return order_.size(); }

  void add(uint64_t key) {
    take(key);
    where_[key] = order_.insert(order_.end(), key);
  }

  bool take(uint64_t key) {
    auto found = where_.find(key);
    if (found == where_.end()) return false;
    order_.erase(found->second);
    where_.erase(found);
    return true;
  }

  void trim(size_t most) {
    while (order_.size() > most) {
      where_.erase(order_.front());
      order_.pop_front();
    }
  }

 private:
  std::list<uint64_t> order_;
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> where_;
};

class Arc final : public Policy {
 public:
  explicit Arc(Nodes& nodes) : nodes_(nodes), queues_{List(nodes), List(nodes)} {}

  void insert(uint32_t at) override {
    Node& node = nodes_[at];
    double once = static_cast<double>(lost_[kOnce].size()), again = static_cast<double>(lost_[kAgain].size());
    if (lost_[kOnce].take(node.key)) {
      share_ = std::min(capacity_, share_ + std::max(1.0, again / once));
      node.list = kAgain;
    } else if (lost_[kAgain].take(node.key)) {
      share_ = std::max(0.0, share_ - std::max(1.0, once / again));
      node.list = kAgain;
    } else {
      node.list = kOnce;
    }
    queue(at).push_young(at);
  }

  void touch(uint32_t at) override {
    Node& node = nodes_[at];
    if (!node.parked) queue(at).erase(at);
    node.list = kAgain;
    if (!node.parked) queue(at).push_young(at);
  }

  void leave(uint32_t at) override { queue(at).erase(at); }
  void come_back(uint32_t at) override { queue(at).push_young(at); }

  uint32_t oldest() override {
    const List &once = queues_[kOnce], &again = queues_[kAgain];
    bool from_once = once.size() != 0 && (again.size() == 0 || static_cast<double>(once.size()) > share_);
    return from_once ? once.oldest() : again.oldest();
  }

  void evicted(uint32_t at) override {
    capacity_ = static_cast<double>(nodes_.size());
    lost_[nodes_[at].list].add(nodes_[at].key);
    size_t once = queues_[kOnce].size() - (nodes_[at].list == kOnce);
    lost_[kOnce].trim(nodes_.size() - std::min(nodes_.size(), once));
    lost_[kAgain].trim(nodes_.size() - std::min(nodes_.size(), lost_[kOnce].size()));
  }

 private:
  List& queue(uint32_t at) { return queues_[nodes_[at].list]; }

  Nodes& nodes_;
  List queues_[2];
  Lost lost_[2];
  double share_ = 0;  // how long the queue of ids used once should be
  double capacity_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_arc(Nodes& nodes) { return std::make_unique<Arc>(nodes); }

}  // namespace mooncake::store
