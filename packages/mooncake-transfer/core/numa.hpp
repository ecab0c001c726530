// How much farther memory of another node is.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace mooncake {

class NumaDistances {
 public:
  NumaDistances() = default;
  // As in sysfs: row and column per node, 10 for a node itself.
  explicit NumaDistances(std::vector<std::vector<uint32_t>> distances) : distances_(std::move(distances)) {}

  // By what factor to lengthen a rail's predicted time: 1 on the same node, or when either node is unknown.
  double penalty(int from, int to) const {
    if (from < 0 || to < 0 || static_cast<size_t>(from) >= distances_.size()) return 1;
    const auto& row = distances_[static_cast<size_t>(from)];
    if (static_cast<size_t>(to) >= row.size()) return 1;
    return std::max(1.0, row[static_cast<size_t>(to)] / 10.0);
  }

 private:
  std::vector<std::vector<uint32_t>> distances_;
};

}  // namespace mooncake
