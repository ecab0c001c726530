#include <algorithm>
#include <limits>
#include <numeric>

#include "eplb_state.hpp"

namespace mooncake::ep {

namespace {

// DeepSeek's placement over the live ranks, and what its heaviest rank carries.
struct Goal {
  double load = std::numeric_limits<double>::infinity();
  std::vector<std::vector<int64_t>> packs;  // experts of each of its ranks; none where it cannot place
};

Goal deepseeks(const Machine& machine, const float* load, size_t ranks, size_t slots_of_rank) {
  size_t slots = ranks * slots_of_rank;
  auto group = static_cast<float>(std::accumulate(load, load + machine.experts, 0.0));
  std::vector<int64_t> expert_of(slots), replica_of(slots), counts(machine.experts);
  rebalance_exact({1, machine.experts, slots, 1, 1, ranks}, load, &group, expert_of.data(), replica_of.data(),
                  counts.data());
  Goal goal{0, {}};
  for (auto first = expert_of.begin(); first != expert_of.end();
       first += static_cast<ptrdiff_t>(slots_of_rank)) {
    goal.packs.emplace_back(first, first + static_cast<ptrdiff_t>(slots_of_rank));
    double carried = 0;
    for (int64_t expert : goal.packs.back()) carried += load[expert] / static_cast<double>(counts[expert]);
    goal.load = std::max(goal.load, carried);
  }
  return goal;
}

// With ranks of different sizes, which DeepSeek's cannot place, what a placement made from nothing reaches.
Goal load_to_reach(const Machine& machine, const float* load) {
  std::vector<size_t> sizes;
  for (size_t rank = 0; rank < machine.ranks(); ++rank) {
    if (machine.active[rank]) sizes.push_back(machine.first_slot[rank + 1] - machine.first_slot[rank]);
  }
  bool even = std::all_of(sizes.begin(), sizes.end(), [&](size_t size) { return size == sizes[0]; });
  if (even && sizes.size() * sizes[0] >= machine.experts) {
    return deepseeks(machine, load, sizes.size(), sizes[0]);
  }
  Goal goal;
  Placement fresh(machine, load);
  if (build(fresh)) goal.load = fresh.heaviest();
  return goal;
}

size_t in_common(std::vector<int64_t> pack, const int64_t* begin, const int64_t* end) {
  size_t common = 0;
  for (; begin != end; ++begin) {
    auto found = std::find(pack.begin(), pack.end(), *begin);
    if (found == pack.end()) continue;
    pack.erase(found);
    ++common;
  }
  return common;
}

// DeepSeek's placement, each rank with the part of it that is most like what the rank has.
bool adopt_goal(Placement& placement, const Goal& goal, const int64_t* before) {
  auto& machine = placement.machine();
  std::vector<bool> taken(goal.packs.size());
  for (size_t rank = 0; rank < machine.ranks() && !goal.packs.empty(); ++rank) {
    if (!machine.active[rank]) continue;
    size_t first = machine.first_slot[rank], best = goal.packs.size(), most = 0;
    for (size_t pack = 0; pack < goal.packs.size(); ++pack) {
      if (taken[pack]) continue;
      size_t common = in_common(goal.packs[pack], before + first, before + machine.first_slot[rank + 1]);
      if (best == goal.packs.size() || common > most) best = pack, most = common;
    }
    taken[best] = true;
    for (int64_t expert : goal.packs[best]) {
      if (placement.may_hold(rank, expert)) placement.put(first++, expert);
    }
  }
  return complete(placement);
}

// What a rank had and keeps stays in its slot; the rest takes the slots that are left.
std::vector<int64_t> keep_slots(const Placement& placement, const int64_t* before) {
  auto& machine = placement.machine();
  std::vector<int64_t> after(machine.slots(), kEmpty);
  for (size_t rank = 0; rank < machine.ranks(); ++rank) {
    if (!machine.active[rank]) continue;
    size_t begin = machine.first_slot[rank], end = machine.first_slot[rank + 1];
    std::vector<int64_t> coming;
    for (size_t slot = begin; slot < end; ++slot) coming.push_back(placement.expert_at(slot));
    std::vector<bool> kept(end - begin);
    for (size_t slot = begin; slot < end; ++slot) {
      auto found = std::find(coming.begin(), coming.end(), before[slot]);
      if (before[slot] == kEmpty || found == coming.end()) continue;
      after[slot] = before[slot];
      kept[slot - begin] = true;
      coming.erase(found);
    }
    size_t next = 0;
    for (size_t slot = begin; slot < end; ++slot) {
      if (!kept[slot - begin]) after[slot] = coming[next++];
    }
  }
  return after;
}

// Sources in turns, so that no rank has to send all.
void list_moves(const Machine& machine, int64_t layer, const int64_t* before,
                const std::vector<int64_t>& after, std::vector<Move>* moves) {
  std::vector<std::vector<int64_t>> sources(machine.experts);
  for (size_t rank = 0; rank < machine.ranks(); ++rank) {
    for (size_t slot = machine.first_slot[rank]; slot < machine.first_slot[rank + 1]; ++slot) {
      if (machine.active[rank] && before[slot] != kEmpty)
        sources[before[slot]].push_back(static_cast<int64_t>(slot));
    }
  }
  std::vector<size_t> used(machine.experts);
  for (size_t slot = 0; slot < after.size(); ++slot) {
    int64_t expert = after[slot];
    if (expert == kEmpty || expert == before[slot]) continue;
    auto& from = sources[expert];
    int64_t source = from.empty() ? kEmpty : from[used[expert]++ % from.size()];
    moves->push_back({layer, expert, source, static_cast<int64_t>(slot)});
  }
}

size_t changed(const Placement& placement, const int64_t* before) {
  auto& slots = placement.live_slots();
  return std::count_if(slots.begin(), slots.end(),
                       [&](size_t s) { return placement.expert_at(s) != before[s]; });
}

}  // namespace

bool rebalance_layer(const Machine& machine, const float* load, int64_t layer, int64_t* expert_of,
                     std::vector<Move>* moves) {
  Goal goal = load_to_reach(machine, load);
  double target = goal.load * (1 + 1e-9);
  Placement placement(machine, load);
  placement.adopt(expert_of);
  if (!complete(placement) && !build(placement)) return false;
  size_t so_far = changed(placement, expert_of);
  balance(placement, target, machine.max_moves - std::min(machine.max_moves, so_far));
  auto take_if_lighter = [&](Placement& other) {
    balance(other, target, machine.max_moves);
    std::vector<Move> needed;
    list_moves(machine, layer, expert_of, keep_slots(other, expert_of), &needed);
    if (other.heaviest() < placement.heaviest() && needed.size() <= machine.max_moves) placement = other;
  };
  // Where nothing small helps: from nothing, then from DeepSeek's.
  Placement fresh(machine, load), theirs(machine, load);
  if (placement.heaviest() > target && build(fresh)) take_if_lighter(fresh);
  if (placement.heaviest() > target && adopt_goal(theirs, goal, expert_of)) take_if_lighter(theirs);
  auto after = keep_slots(placement, expert_of);
  list_moves(machine, layer, expert_of, after, moves);
  std::copy(after.begin(), after.end(), expert_of);
  return true;
}

}  // namespace mooncake::ep
