// What a transfer moves: a list of blocks, or a grid that names them without listing them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "block_list.hpp"
#include "status.hpp"

namespace mooncake {

// Blocks of one length at regular places: block (o, i), for o < outer and i < count, lies at
// base + o * outer_stride + index[i] * stride on either side. KV caches have this shape: o counts layers.
struct Grid {
  struct Side {
    uint64_t base = 0;
    uint64_t stride = 0;
    uint64_t outer_stride = 0;
    std::vector<uint64_t> index;

    uint64_t offset(size_t outer, size_t i) const { return base + outer * outer_stride + index[i] * stride; }
  };
  Side local;
  Side remote;
  uint64_t length = 0;
  size_t outer = 1;
};

class Plan {
 public:
  // Both check that every block lies inside regions of these sizes; the message says which one does not.
  struct Bounds {
    uint64_t local_length;
    uint64_t remote_length;
    std::string local_label;
    std::string remote_label;
  };
  static Status of_blocks(const Block* blocks, size_t count, const Bounds& bounds, Plan* plan);
  static Status of_grid(Grid grid, const Bounds& bounds, Plan* plan);

  size_t size() const { return size_; }
  uint64_t bytes() const { return bytes_; }
  // Every offset and length, or-ed: the low bits that are 0 are the alignment all of them have.
  uint64_t alignment_bits() const { return alignment_bits_; }
  Block at(size_t i) const {
    if (!is_grid_) return blocks_[i];
    size_t outer = i / grid_.local.index.size(), inner = i % grid_.local.index.size();
    return {grid_.local.offset(outer, inner), grid_.remote.offset(outer, inner), grid_.length};
  }

 private:
  bool is_grid_ = false;
  BlockList blocks_;
  Grid grid_;
  size_t size_ = 0;
  uint64_t bytes_ = 0;
  uint64_t alignment_bits_ = 0;
};

// Walks through a plan and cuts it into runs of at most so many bytes; adjacent blocks become one run.
class Cursor {
 public:
  bool exhausted(const Plan& plan) const { return next_ == plan.size(); }
  void reset(const Plan& plan) {
    next_ = 0;
    offset_ = 0;
    skip_empty(plan);
  }
  // Not exhausted. A rest of up to a quarter of `limit` is taken along, up to `hard_limit`.
  Block cut(const Plan& plan, uint64_t limit, uint64_t hard_limit);

 private:
  void skip_empty(const Plan& plan) {
    while (next_ < plan.size() && plan.at(next_).length == 0) ++next_;
  }

  size_t next_ = 0;      // block
  uint64_t offset_ = 0;  // within it
};

}  // namespace mooncake
