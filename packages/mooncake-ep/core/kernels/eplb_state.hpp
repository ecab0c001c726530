// The placement of one layer while it is being changed, with the loads that follow from it.
#pragma once

#include <optional>

#include "eplb.hpp"

namespace mooncake::ep {

constexpr int64_t kEmpty = -1;

class Placement {
 public:
  Placement(const Machine& machine, const float* load);

  // Takes over what stands in live slots. What a rank may not hold twice, it then holds once.
  void adopt(const int64_t* expert_of);
  void clear();
  void put(size_t slot, int64_t expert);
  void remove(size_t slot);

  int64_t expert_at(size_t slot) const { return expert_of_[slot]; }
  size_t rank_of(size_t slot) const { return rank_of_[slot]; }
  const std::vector<size_t>& live_slots() const { return live_; }
  size_t count(int64_t expert) const { return counts_[expert]; }
  double load(int64_t expert) const { return load_[expert]; }
  double share(int64_t expert, size_t replicas) const {
    return load_[expert] / static_cast<double>(replicas);
  }
  double share(int64_t expert) const { return share(expert, counts_[expert]); }
  double rank_load(size_t rank) const { return rank_load_[rank]; }
  bool may_hold(size_t rank, int64_t expert) const {
    return !machine_->apart || held_[rank * machine_->experts + expert] == 0;
  }
  const Machine& machine() const { return *machine_; }
  size_t live_ranks() const { return live_ranks_; }
  // How many replicas of one expert there may be.
  size_t most_replicas() const { return machine_->apart ? live_ranks_ : live_.size(); }
  size_t heaviest_rank() const;
  double heaviest() const { return rank_load_[heaviest_rank()]; }
  // Slots of live ranks with this expert; unordered.
  const std::vector<size_t>& slots_of(int64_t expert) const { return slots_of_[expert]; }

 private:
  void recount(int64_t expert, size_t before);

  const Machine* machine_;
  const float* load_;
  std::vector<int64_t> expert_of_;
  std::vector<size_t> rank_of_, live_, counts_;
  std::vector<uint16_t> held_;  // by rank and expert
  std::vector<double> rank_load_;
  std::vector<std::vector<size_t>> slots_of_;
  size_t live_ranks_ = 0;
};

// Fills empty slots; every expert then has min_replicas. False when that cannot be reached from here.
bool complete(Placement& placement);
// Places everything anew, from nothing. False when the machine has no room.
bool build(Placement& placement);
// Exchanges and replaces replicas until no rank carries more than `target`, nothing helps, or `budget` slots
// were changed.
void balance(Placement& placement, double target, size_t budget);

}  // namespace mooncake::ep
