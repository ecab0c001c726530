// Objects that share a name: a group, or a session. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "slots.hpp"

namespace mooncake::store {

// A version at a slot; it may have left the slot since.
struct Ref {
  uint32_t at;
  uint64_t version;
};

inline bool is_current(const Slots& slots, const Ref& ref) {
  return slots[ref.at].state != State::kFree && slots[ref.at].version == ref.version;
}

// Crowds by number, which is the name's as long as the crowd has members; 0 is none.
class Crowds {
 public:
  explicit Crowds(const Slots& slots) : slots_(slots) {}

  uint32_t find(const std::string& name) const {
    auto found = numbers_.find(name);
    return found == numbers_.end() ? 0 : found->second;
  }

  const std::string& name(uint32_t number) const { return crowds_[number].name; }

  // The number of the crowd that the slot has joined by this.
  uint32_t join(const std::string& name, uint32_t at) {
    uint32_t number = find(name);
    if (number == 0) number = make(name);
    Crowd& crowd = crowds_[number];
    ++crowd.live;
    crowd.refs.push_back({at, slots_[at].version});
    return number;
  }

  // One of its members is not any more. Who that is shows by its slot.
  void leave(uint32_t number) {
    Crowd& crowd = crowds_[number];
    if (--crowd.live == 0) {
      numbers_.erase(crowd.name);
      crowd = {};
      free_.push_back(number);
    } else if (crowd.refs.size() > 2 * crowd.live + 16) {
      std::erase_if(crowd.refs, [this](const Ref& ref) { return !is_current(slots_, ref); });
    }
  }

  // Slots of its members.
  std::vector<uint32_t> members(uint32_t number) const {
    std::vector<uint32_t> found;
    for (const Ref& ref : crowds_[number].refs) {
      if (is_current(slots_, ref)) found.push_back(ref.at);
    }
    // A version that was lost and adopted again may have the slot that it had before.
    std::sort(found.begin(), found.end());
    found.erase(std::unique(found.begin(), found.end()), found.end());
    return found;
  }

 private:
  struct Crowd {
    std::string name;
    std::vector<Ref> refs;
    size_t live = 0;
  };

  uint32_t make(const std::string& name) {
    uint32_t number;
    if (free_.empty()) {
      number = static_cast<uint32_t>(crowds_.size());
      crowds_.emplace_back();
    } else {
      number = free_.back();
      free_.pop_back();
    }
    crowds_[number].name = name;
    numbers_[name] = number;
    return number;
  }

  const Slots& slots_;
  std::vector<Crowd> crowds_{1};
  std::vector<uint32_t> free_;
  std::unordered_map<std::string, uint32_t> numbers_;
};

}  // namespace mooncake::store
