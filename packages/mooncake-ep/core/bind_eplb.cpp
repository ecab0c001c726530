#include <algorithm>
#include <atomic>
#include <thread>

#include "bind.hpp"
#include "kernels/eplb.hpp"
#include "support/gil.hpp"

#include <nanobind/stl/vector.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::ep {

namespace {

void exact(size_t layers, size_t experts, size_t replicas, size_t groups, size_t nodes, size_t gpus,
           uintptr_t load, uintptr_t group_load, uintptr_t expert_of, uintptr_t replica_of,
           uintptr_t counts) {
  GilReleased released;
  rebalance_exact({layers, experts, replicas, groups, nodes, gpus}, at<const float>(load),
                  at<const float>(group_load), at<int64_t>(expert_of), at<int64_t>(replica_of),
                  at<int64_t>(counts));
}

// Layers do not know of each other. Returns the first that has no room, or their number.
size_t place_layers(const Machine& machine, size_t layers, const float* load, int64_t* expert_of,
                    std::vector<std::vector<Move>>* moves) {
  std::atomic<size_t> next{0}, failed{layers};
  auto work = [&] {
    for (size_t layer = next++; layer < layers; layer = next++) {
      bool placed = rebalance_layer(machine, load + layer * machine.experts, static_cast<int64_t>(layer),
                                    expert_of + layer * machine.slots(), &(*moves)[layer]);
      if (!placed) failed = layer;
    }
  };
  std::vector<std::thread> threads;
  size_t wanted = std::min<size_t>({layers, std::thread::hardware_concurrency(), 8});
  for (size_t i = 1; i < wanted; ++i) threads.emplace_back(work);
  work();
  for (auto& thread : threads) thread.join();
  return failed;
}

nb::bytes rebalance(const std::vector<size_t>& slots_of_rank, const std::vector<bool>& active, size_t layers,
                    size_t experts, size_t min_replicas, bool apart, size_t max_moves, uintptr_t load,
                    uintptr_t expert_of) {
  Machine machine{{0}, {active.begin(), active.end()}, experts, min_replicas, apart, max_moves};
  for (size_t slots : slots_of_rank) machine.first_slot.push_back(machine.first_slot.back() + slots);
  std::vector<std::vector<Move>> moves(layers);
  std::vector<Move> all;
  {
    GilReleased released;
    size_t failed = place_layers(machine, layers, at<const float>(load), at<int64_t>(expert_of), &moves);
    if (failed != layers) throw nb::value_error("no room");
    for (auto& of_layer : moves) all.insert(all.end(), of_layer.begin(), of_layer.end());
  }
  return nb::bytes(reinterpret_cast<const char*>(all.data()), all.size() * sizeof(Move));
}

}  // namespace

void bind_eplb(nb::module_& m) {
  m.def("eplb_exact", &exact, "layers"_a, "experts"_a, "replicas"_a, "groups"_a, "nodes"_a, "gpus"_a,
        "load"_a, "group_load"_a, "expert_of"_a, "replica_of"_a, "counts"_a,
        "DeepSeek's placement. Addresses of float32 load [layers, experts] and group_load [layers, groups], "
        "and of\n"
        "int64 results: expert_of and replica_of [layers, replicas], counts [layers, experts].");
  m.def("eplb_rebalance", &rebalance, "slots_of_rank"_a, "active"_a, "layers"_a, "experts"_a,
        "min_replicas"_a, "apart"_a, "max_moves"_a, "load"_a, "expert_of"_a,
        "Change int64 expert_of [layers, slots] in place so that float32 load [layers, experts] is spread "
        "evenly.\n"
        "Returns the moves, four int64 each: layer, expert, source, destination. Raises ValueError without "
        "room.");
}

}  // namespace mooncake::ep
