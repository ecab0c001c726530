// Random copies of what is in an object map: begun, ended, given up and abandoned at any time, and always
// with the bytes of their version.
#pragma once

#include <algorithm>
#include <random>
#include <utility>
#include <vector>

#include "object_map.hpp"
#include "stamps.hpp"

namespace mooncake::store {

class CopySteps {
  struct Copying {
    uint64_t version;
    CopyBegun begun;
    bool given_up = false;
  };

 public:
  using Lent = std::vector<std::pair<uint64_t, uint32_t>>;  // ids of segments, and their owners

  explicit CopySteps(Stamps& memory) : memory_(memory) {}

  size_t size() const { return copies_.size(); }
  void clear() { copies_.clear(); }
  // Those whose source is leased.
  uint64_t reading() const {
    auto reads = [](const Copying& one) { return !one.given_up; };
    return static_cast<uint64_t>(std::count_if(copies_.begin(), copies_.end(), reads));
  }

  void begin(ObjectMap& map, const Ref& ref, const CopyWish& wish) {
    CopyBegun begun = map.copy_begin(ref, wish);
    if (begun.outcome != Copied::kPending) return;
    memory_.write(begun.target, 0);
    copies_.push_back({ref.version, begun});
  }

  void begin_some(ObjectMap& map, const std::vector<Digest>& digests, const Lent& lent,
                  std::mt19937_64& random) {
    if (random() % 4 == 0) return evacuate(map, lent, random);
    for (const Whereabouts& found : map.whereabouts(digests)) {
      if (found.ref.at == kNoSlot) continue;
      CopyWish wish{.mover = found.mover};
      if (random() % 2 == 0) wish.target = lent[random() % lent.size()].first;
      if (random() % 2 == 0) wish.leaving = lent[random() % lent.size()].first;
      wish.evicts = random() % 2 == 0;
      begin(map, found.ref, wish);
    }
  }

  void evacuate(ObjectMap& map, const Lent& lent, std::mt19937_64& random) {
    auto [id, member] = lent[random() % lent.size()];
    map.open_segment(id, random() % 4 == 0);
    uint32_t from = 0;
    while (from != kNoSlot) {
      Evacuation found = map.lying_in(id, from, 64, 8 * Stamps::kGranule);
      from = found.next;
      for (const Ref& ref : found.todo) {
        if (random() % 4 == 0) {
          map.relinquish(ref, id);
        } else {
          begin(map, ref, {.mover = member, .leaving = id, .evicts = random() % 2 == 0});
        }
      }
    }
  }

  void end_one(ObjectMap& map, double now_s, std::mt19937_64& random) {
    if (copies_.empty()) return;
    std::swap(copies_[random() % copies_.size()], copies_.back());
    Copying& one = copies_.back();
    if (random() % 5 == 0) {
      map.copy_give_up(one.begun.slot);
      one.given_up = true;
      return;
    }
    std::vector<uint32_t> slot{one.begun.slot};
    if (random() % 5 == 0) {
      map.abandon(slot);
    } else {
      if (!one.given_up) move_bytes(one);
      Copied outcome = map.copy_end(slot[0], "a key", now_s);
      require(!one.given_up || outcome == Copied::kLost, "what was given up does not become a replica");
    }
    copies_.pop_back();
  }

  void move_bytes(const Copying& one) {
    require(memory_.have(one.begun.source, one.version), "the source stays while it is copied");
    memory_.write(one.begun.target, one.version);
  }

  void mend(ObjectMap& map, const std::vector<Digest>& digests, std::mt19937_64& random) {
    if (random() % 3 == 0) map.want(digests, 1 + random() % 3);
    for (const Mending& one : map.take_mending(2)) {
      if (random() % 2 == 0) begin(map, one.ref, {.mover = one.mover});
      map.mended(one.ref);
    }
  }

 private:
  Stamps& memory_;
  std::vector<Copying> copies_;
};

}  // namespace mooncake::store
