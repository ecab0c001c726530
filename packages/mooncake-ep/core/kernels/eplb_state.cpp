#include "eplb_state.hpp"

#include <algorithm>

namespace mooncake::ep {

Placement::Placement(const Machine& machine, const float* load)
    : machine_(&machine),
      load_(load),
      expert_of_(machine.slots(), kEmpty),
      rank_of_(machine.slots()),
      counts_(machine.experts),
      held_(machine.ranks() * machine.experts),
      rank_load_(machine.ranks()),
      slots_of_(machine.experts) {
  for (size_t rank = 0; rank < machine.ranks(); ++rank) {
    live_ranks_ += machine.active[rank];
    for (size_t slot = machine.first_slot[rank]; slot < machine.first_slot[rank + 1]; ++slot) {
      rank_of_[slot] = rank;
      if (machine.active[rank]) live_.push_back(slot);
    }
  }
}

void Placement::adopt(const int64_t* expert_of) {
  for (size_t slot : live_) {
    if (expert_of[slot] != kEmpty && may_hold(rank_of_[slot], expert_of[slot])) put(slot, expert_of[slot]);
  }
}

void Placement::clear() {
  for (size_t slot : live_) {
    if (expert_of_[slot] != kEmpty) remove(slot);
  }
}

void Placement::put(size_t slot, int64_t expert) {
  size_t before = counts_[expert]++, rank = rank_of_[slot];
  expert_of_[slot] = expert;
  ++held_[rank * machine_->experts + expert];
  recount(expert, before);
  slots_of_[expert].push_back(slot);
  rank_load_[rank] += share(expert);
}

void Placement::remove(size_t slot) {
  int64_t expert = expert_of_[slot];
  size_t rank = rank_of_[slot], before = counts_[expert];
  rank_load_[rank] -= share(expert);
  auto& slots = slots_of_[expert];
  *std::find(slots.begin(), slots.end(), slot) = slots.back();
  slots.pop_back();
  --held_[rank * machine_->experts + expert];
  --counts_[expert];
  expert_of_[slot] = kEmpty;
  recount(expert, before);
}

// The replicas that stay carry other shares now.
void Placement::recount(int64_t expert, size_t before) {
  if (slots_of_[expert].empty()) return;
  double change = share(expert) - share(expert, before);
  for (size_t slot : slots_of_[expert]) rank_load_[rank_of_[slot]] += change;
}

size_t Placement::heaviest_rank() const {
  return std::max_element(rank_load_.begin(), rank_load_.end()) - rank_load_.begin();
}

}  // namespace mooncake::ep
