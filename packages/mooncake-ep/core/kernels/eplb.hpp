// Where replicas of experts go: DeepSeek's published algorithm to the letter, and one that starts from what
// is there and moves little.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mooncake::ep {

// Sizes of DeepSeek's algorithm. Every division of one by the next that it needs leaves no remainder.
struct ExactSizes {
  size_t layers, experts, replicas, groups, nodes, gpus;
};

// load: [layers, experts]; group_load: [layers, groups], its sums. Writes the expert of every slot and which
// of its replicas that is, [layers, replicas], and how many each expert has, [layers, experts]. Sums are
// taken in float32 in the order of the published code, and equal loads stay in order of expert.
void rebalance_exact(const ExactSizes& sizes, const float* load, const float* group_load, int64_t* expert_of,
                     int64_t* replica_of, int64_t* counts);

// What a placement of one layer has to keep to.
struct Machine {
  std::vector<size_t> first_slot;  // of each rank, and one past the last slot of all
  std::vector<uint8_t> active;     // by rank
  size_t experts;
  size_t min_replicas;
  bool apart;  // replicas of an expert on different ranks
  size_t max_moves;

  size_t ranks() const { return active.size(); }
  size_t slots() const { return first_slot.back(); }
};

// One replica to be brought to a slot. All sources are slots of the placement before; -1: no live slot has
// it.
struct Move {
  int64_t layer, expert, source, destination;
};

// Places one layer: `expert_of` has the experts of slots as they are (-1: none), and as they are to be
// afterwards. Appends to `moves`. False when the machine has no room for `min_replicas` of every expert.
bool rebalance_layer(const Machine& machine, const float* load, int64_t layer, int64_t* expert_of,
                     std::vector<Move>* moves);

}  // namespace mooncake::ep
