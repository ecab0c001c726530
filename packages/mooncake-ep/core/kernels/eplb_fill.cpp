#include <algorithm>
#include <limits>
#include <numeric>

#include "eplb_state.hpp"

namespace mooncake::ep {

namespace {

constexpr size_t kNowhere = std::numeric_limits<size_t>::max();

// The empty slot on the lightest rank that may have this expert.
size_t empty_slot_for(const Placement& placement, int64_t expert) {
  size_t best = kNowhere;
  for (size_t slot : placement.live_slots()) {
    size_t rank = placement.rank_of(slot);
    if (placement.expert_at(slot) != kEmpty || !placement.may_hold(rank, expert)) continue;
    if (best == kNowhere || placement.rank_load(rank) < placement.rank_load(placement.rank_of(best))) {
      best = slot;
    }
  }
  return best;
}

// The slot whose replica is missed least, of experts that have more than `keep`.
size_t spare_slot_for(const Placement& placement, int64_t expert, size_t keep) {
  size_t best = kNowhere;
  double least = std::numeric_limits<double>::infinity();
  for (size_t slot : placement.live_slots()) {
    int64_t resident = placement.expert_at(slot);
    if (resident == kEmpty || resident == expert || placement.count(resident) <= keep) continue;
    if (!placement.may_hold(placement.rank_of(slot), expert)) continue;
    double then = placement.share(resident, placement.count(resident) - 1);
    if (then < least) least = then, best = slot;
  }
  return best;
}

bool place(Placement& placement, int64_t expert, size_t keep) {
  size_t slot = empty_slot_for(placement, expert);
  if (slot == kNowhere) {
    slot = spare_slot_for(placement, expert, keep);
    if (slot == kNowhere) return false;
    placement.remove(slot);
  }
  placement.put(slot, expert);
  return true;
}

std::vector<int64_t> by_load(const Placement& placement) {
  std::vector<int64_t> order(placement.machine().experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return placement.load(a) > placement.load(b); });
  return order;
}

// The expert with the most load for each of its replicas that an empty slot may take.
bool fill_one(Placement& placement) {
  int64_t hottest = kEmpty;
  size_t best = kNowhere;
  for (size_t i = 0; i < placement.machine().experts; ++i) {
    auto expert = static_cast<int64_t>(i);
    if (placement.count(expert) >= placement.most_replicas()) continue;
    if (hottest != kEmpty && placement.share(expert) <= placement.share(hottest)) continue;
    size_t slot = empty_slot_for(placement, expert);
    if (slot != kNowhere) hottest = expert, best = slot;
  }
  if (best == kNowhere) return false;
  placement.put(best, hottest);
  return true;
}

size_t empty_slots(const Placement& placement) {
  auto& slots = placement.live_slots();
  return std::count_if(slots.begin(), slots.end(),
                       [&](size_t s) { return placement.expert_at(s) == kEmpty; });
}

// How many replicas each expert gets of a machine that is empty.
std::vector<size_t> share_out(const Placement& placement) {
  size_t least = placement.machine().min_replicas;
  std::vector<size_t> counts(placement.machine().experts, least);
  size_t left = placement.live_slots().size() - least * counts.size();
  for (; left > 0; --left) {
    size_t hottest = kNowhere;
    double most = -1;
    for (size_t i = 0; i < counts.size(); ++i) {
      double share = placement.share(static_cast<int64_t>(i), counts[i]);
      if (counts[i] < placement.most_replicas() && share > most) most = share, hottest = i;
    }
    if (hottest == kNowhere) break;
    ++counts[hottest];
  }
  return counts;
}

// What has most replicas goes first, to the ranks with most room: when there is a way at all, this is one.
bool build_by_room(Placement& placement, const std::vector<size_t>& counts) {
  auto& machine = placement.machine();
  std::vector<size_t> order(machine.experts), next(machine.first_slot.begin(), machine.first_slot.end() - 1);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return counts[a] > counts[b]; });
  auto room = [&](size_t rank) {
    return machine.active[rank] ? machine.first_slot[rank + 1] - next[rank] : 0;
  };
  for (size_t expert : order) {
    for (size_t made = 0; made < counts[expert]; ++made) {
      size_t best = kNowhere;
      for (size_t rank = 0; rank < machine.ranks(); ++rank) {
        if (room(rank) == 0 || !placement.may_hold(rank, static_cast<int64_t>(expert))) continue;
        if (best == kNowhere || room(rank) > room(best)) best = rank;
      }
      if (best == kNowhere) {
        if (made < machine.min_replicas) return false;
        break;
      }
      placement.put(next[best]++, static_cast<int64_t>(expert));
    }
  }
  return true;
}

// Heaviest replica first, each to the lightest rank: close to even.
bool build_by_load(Placement& placement, const std::vector<size_t>& counts) {
  std::vector<int64_t> replicas;
  for (size_t i = 0; i < counts.size(); ++i)
    replicas.insert(replicas.end(), counts[i], static_cast<int64_t>(i));
  std::stable_sort(replicas.begin(), replicas.end(), [&](int64_t a, int64_t b) {
    return placement.share(a, counts[a]) > placement.share(b, counts[b]);
  });
  // Loads of ranks as they will be, not as they are while an expert has fewer replicas than it will have.
  std::vector<double> sums(placement.machine().ranks());
  for (int64_t expert : replicas) {
    size_t best = kNowhere;
    for (size_t slot : placement.live_slots()) {
      size_t rank = placement.rank_of(slot);
      if (placement.expert_at(slot) != kEmpty || !placement.may_hold(rank, expert)) continue;
      if (best == kNowhere || sums[rank] < sums[placement.rank_of(best)]) best = slot;
    }
    if (best == kNowhere) return false;
    placement.put(best, expert);
    sums[placement.rank_of(best)] += placement.share(expert, counts[expert]);
  }
  return true;
}

}  // namespace

bool complete(Placement& placement) {
  auto order = by_load(placement);
  for (size_t level = 1; level <= placement.machine().min_replicas; ++level) {
    for (int64_t expert : order) {
      if (placement.count(expert) < level && !place(placement, expert, level)) return false;
    }
  }
  for (size_t left = empty_slots(placement); left > 0; --left) {
    if (!fill_one(placement)) break;
  }
  return true;
}

bool build(Placement& placement) {
  auto& machine = placement.machine();
  if (placement.live_slots().size() < machine.experts * machine.min_replicas) return false;
  auto counts = share_out(placement);
  placement.clear();
  if (build_by_load(placement, counts)) return true;
  placement.clear();
  return build_by_room(placement, counts);
}

}  // namespace mooncake::ep
