#include "eviction_queue.hpp"

namespace mooncake::store {

std::unique_ptr<EvictionQueue> EvictionQueue::make(std::string_view policy) {
  std::unique_ptr<EvictionQueue> queue(new EvictionQueue);
  queue->policy_ = make_policy(policy, queue->nodes_);
  if (queue->policy_ == nullptr) return nullptr;
  return queue;
}

bool EvictionQueue::insert(uint64_t id, uint64_t key, uint64_t nbytes) {
  if (contains(id)) return false;
  policy_->insert(nodes_.add({.id = id, .key = key, .nbytes = nbytes}));
  return true;
}

bool EvictionQueue::touch(uint64_t id) {
  uint32_t at = nodes_.find(id);
  if (at == kNone) return false;
  policy_->touch(at);
  return true;
}

bool EvictionQueue::pin(uint64_t id) {
  uint32_t at = nodes_.find(id);
  if (at == kNone) return false;
  ++nodes_[at].pins;
  return true;
}

bool EvictionQueue::unpin(uint64_t id) {
  uint32_t at = nodes_.find(id);
  if (at == kNone || nodes_[at].pins == 0) return false;
  Node& node = nodes_[at];
  if (--node.pins == 0 && node.parked) {
    node.parked = false;
    policy_->come_back(at);
  }
  return true;
}

bool EvictionQueue::remove(uint64_t id) {
  uint32_t at = nodes_.find(id);
  if (at == kNone) return false;
  if (last_victim_ == id) {
    policy_->evicted(at);
    last_victim_.reset();
  }
  if (!nodes_[at].parked) policy_->leave(at);
  nodes_.remove(at);
  return true;
}

std::optional<uint64_t> EvictionQueue::victim() {
  last_victim_.reset();
  for (uint32_t at; (at = policy_->oldest()) != kNone;) {
    if (nodes_[at].pins != 0) {
      policy_->leave(at);
      nodes_[at].parked = true;
    } else if (!policy_->spare(at)) {
      last_victim_ = nodes_[at].id;
      break;
    }
  }
  return last_victim_;
}

}  // namespace mooncake::store
