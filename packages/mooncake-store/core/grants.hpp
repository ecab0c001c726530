// Promises with a deadline: leases of readers and reservations of writers.
#pragma once

#include <cstdint>
#include <list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace mooncake::store {

// What a client was promised about some objects, in the order it named them, until `deadline_s`.
struct Grant {
  uint64_t id, client;
  std::vector<uint32_t> slots;
  double deadline_s;
  std::vector<std::string> keys;  // of a reservation: the texts of the keys
};

// Grants of one kind, which all live equally long unless renewed. Times are the caller's, and never go back.
// Not thread-safe.
class GrantTable {
 public:
  explicit GrantTable(double ttl_s) : ttl_s_(ttl_s) {}
  GrantTable(const GrantTable&) = delete;

  size_t size() const { return by_id_.size(); }
  // Promises something anew. Ids are never used again.
  const Grant& grant(uint64_t client, std::vector<uint32_t> slots, double now_s,
                     std::vector<std::string> keys = {}) {
    by_deadline_.push_back({++last_id_, client, std::move(slots), now_s + ttl_s_, std::move(keys)});
    by_id_.emplace(last_id_, --by_deadline_.end());
    return by_deadline_.back();
  }
  // Lets a grant of the client live for another full time; false when it has none of this id.
  bool renew(uint64_t id, uint64_t client, double now_s) {
    auto found = by_id_.find(id);
    if (found == by_id_.end() || found->second->client != client) return false;
    found->second->deadline_s = now_s + ttl_s_;
    by_deadline_.splice(by_deadline_.end(), by_deadline_, found->second);
    return true;
  }
  // A grant of the client; null when it has none of this id.
  const Grant* find(uint64_t id, uint64_t client) const {
    auto found = by_id_.find(id);
    return found == by_id_.end() || found->second->client != client ? nullptr : &*found->second;
  }
  // Whether it has not ended.
  bool has(uint64_t id) const { return by_id_.contains(id); }
  // Ends a grant of the client.
  std::optional<Grant> take(uint64_t id, uint64_t client) {
    auto found = by_id_.find(id);
    if (found == by_id_.end() || found->second->client != client) return std::nullopt;
    return take(found->second);
  }
  // Ends every grant of a client.
  std::vector<Grant> take_all(uint64_t client) {
    std::vector<Grant> ended;
    for (auto at = by_deadline_.begin(); at != by_deadline_.end();) {
      auto next = std::next(at);
      if (at->client == client) ended.push_back(take(at));
      at = next;
    }
    return ended;
  }
  // Ends the grants whose deadline has passed.
  std::vector<Grant> take_expired(double now_s) {
    std::vector<Grant> ended;
    while (!by_deadline_.empty() && by_deadline_.front().deadline_s <= now_s) {
      ended.push_back(take(by_deadline_.begin()));
    }
    return ended;
  }
  // Id of the last grant; later ones have higher ids.
  uint64_t newest() const { return last_id_; }
  // Every grant that has not ended.
  std::vector<Grant> all() const { return {by_deadline_.begin(), by_deadline_.end()}; }
  // The slots of each grant that was given no later than that of this id, and has not ended.
  std::vector<std::vector<uint32_t>> slots_until(uint64_t newest) const {
    std::vector<std::vector<uint32_t>> found;
    for (const Grant& grant : by_deadline_) {
      if (grant.id <= newest) found.push_back(grant.slots);
    }
    return found;
  }
  std::optional<double> first_deadline_s() const {
    return by_deadline_.empty() ? std::nullopt : std::optional(by_deadline_.front().deadline_s);
  }

 private:
  using Place = std::list<Grant>::iterator;

  Grant take(Place at) {
    Grant grant = std::move(*at);
    by_id_.erase(grant.id);
    by_deadline_.erase(at);
    return grant;
  }

  const double ttl_s_;
  uint64_t last_id_ = 0;
  std::list<Grant> by_deadline_;  // earliest first
  std::unordered_map<uint64_t, Place> by_id_;
};

}  // namespace mooncake::store
