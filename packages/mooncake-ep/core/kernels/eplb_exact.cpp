#include <algorithm>
#include <numeric>

#include "eplb.hpp"

namespace mooncake::ep {

namespace {

struct Packing {
  std::vector<size_t> pack_of, place_of;
};

// Heaviest first, each to the lightest pack that has room; all packs get as many items.
Packing pack_evenly(const std::vector<float>& weight, size_t packs) {
  size_t items = weight.size(), room = items / packs;
  Packing found{std::vector<size_t>(items), std::vector<size_t>(items)};
  if (room == 1) {
    std::iota(found.pack_of.begin(), found.pack_of.end(), 0);
    return found;
  }
  std::vector<size_t> order(items), filled(packs);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return weight[a] > weight[b]; });
  std::vector<float> sums(packs);
  for (size_t item : order) {
    size_t best = packs;
    for (size_t pack = 0; pack < packs; ++pack) {
      if (filled[pack] < room && (best == packs || sums[pack] < sums[best])) best = pack;
    }
    found.pack_of[item] = best;
    found.place_of[item] = filled[best]++;
    sums[best] += weight[item];
  }
  return found;
}

struct Replicas {
  std::vector<size_t> expert_of, replica_of;
  std::vector<int64_t> counts;
};

// One more replica, again and again, for the expert with the most load for each of its replicas.
Replicas replicate(const std::vector<float>& load, size_t slots) {
  size_t experts = load.size();
  Replicas found{std::vector<size_t>(slots), std::vector<size_t>(slots), std::vector<int64_t>(experts, 1)};
  std::iota(found.expert_of.begin(), found.expert_of.begin() + experts, 0);
  std::vector<float> share(load);
  for (size_t slot = experts; slot < slots; ++slot) {
    size_t hottest = std::max_element(share.begin(), share.end()) - share.begin();
    found.expert_of[slot] = hottest;
    found.replica_of[slot] = found.counts[hottest]++;
    share[hottest] = load[hottest] / static_cast<float>(found.counts[hottest]);
  }
  return found;
}

// Experts of a layer in order of the node that their group goes to.
std::vector<size_t> order_by_node(const ExactSizes& sizes, const float* group_load) {
  Packing packed = pack_evenly({group_load, group_load + sizes.groups}, sizes.nodes);
  size_t group_size = sizes.experts / sizes.groups, groups_of_node = sizes.groups / sizes.nodes;
  std::vector<size_t> expert_at(sizes.experts);
  for (size_t group = 0; group < sizes.groups; ++group) {
    size_t first = (packed.pack_of[group] * groups_of_node + packed.place_of[group]) * group_size;
    for (size_t i = 0; i < group_size; ++i) expert_at[first + i] = group * group_size + i;
  }
  return expert_at;
}

}  // namespace

void rebalance_exact(const ExactSizes& sizes, const float* load, const float* group_load, int64_t* expert_of,
                     int64_t* replica_of, int64_t* counts) {
  size_t experts = sizes.experts / sizes.nodes, slots = sizes.replicas / sizes.nodes;
  size_t gpus = sizes.gpus / sizes.nodes, slots_of_gpu = slots / gpus;
  for (size_t layer = 0; layer < sizes.layers; ++layer) {
    const float* load_of = load + layer * sizes.experts;
    std::vector<size_t> expert_at = order_by_node(sizes, group_load + layer * sizes.groups);
    for (size_t node = 0; node < sizes.nodes; ++node) {
      const size_t* here = expert_at.data() + node * experts;
      std::vector<float> loads(experts), shares(slots);
      for (size_t i = 0; i < experts; ++i) loads[i] = load_of[here[i]];
      Replicas made = replicate(loads, slots);
      for (size_t i = 0; i < slots; ++i) {
        shares[i] = loads[made.expert_of[i]] / static_cast<float>(made.counts[made.expert_of[i]]);
      }
      Packing packed = pack_evenly(shares, gpus);
      size_t first = layer * sizes.replicas + node * slots;
      for (size_t i = 0; i < slots; ++i) {
        size_t slot = first + packed.pack_of[i] * slots_of_gpu + packed.place_of[i];
        expert_of[slot] = static_cast<int64_t>(here[made.expert_of[i]]);
        replica_of[slot] = static_cast<int64_t>(made.replica_of[i]);
      }
      for (size_t i = 0; i < experts; ++i) counts[layer * sizes.experts + here[i]] = made.counts[i];
    }
  }
}

}  // namespace mooncake::ep
