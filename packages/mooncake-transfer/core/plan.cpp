#include "plan.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

namespace mooncake {

namespace {

constexpr size_t kCheckedAtOnce = 4096;  // blocks

__extension__ typedef unsigned __int128 Wide;  // sums and products of 64-bit numbers never wrap in it

std::string range_text(Wide offset, uint64_t length) {
  std::string text = offset > std::numeric_limits<uint64_t>::max()
                         ? "2^64 or more"
                         : std::to_string(static_cast<uint64_t>(offset));
  return "[" + text + ", " + text + " + " + std::to_string(length) + ")";
}

Status outside(Wide offset, uint64_t length, const std::string& label, uint64_t size) {
  return Status::error(Code::kRefused, "block " + range_text(offset, length) + " is outside " + label +
                                           " of " + std::to_string(size) + " bytes");
}

bool inside(Wide offset, uint64_t length, uint64_t size) { return offset + length <= size; }

// One of the blocks is.
Status first_outside(const Block* block, const Plan::Bounds& bounds) {
  for (;; ++block) {
    if (!inside(block->local_offset, block->length, bounds.local_length))
      return outside(block->local_offset, block->length, bounds.local_label, bounds.local_length);
    if (!inside(block->remote_offset, block->length, bounds.remote_length))
      return outside(block->remote_offset, block->length, bounds.remote_label, bounds.remote_length);
  }
}

// The largest offset of a side; every one is at most this.
Status check_side(const Grid::Side& side, size_t outer, uint64_t length, const std::string& label,
                  uint64_t size) {
  uint64_t last = *std::max_element(side.index.begin(), side.index.end());
  Wide rows = Wide(outer - 1) * side.outer_stride;
  Wide columns = Wide(last) * side.stride;
  // Each part alone, or their sum may not fit even here.
  if (rows > size) return outside(rows, length, label, size);
  if (columns > size) return outside(columns, length, label, size);
  Wide offset = rows + columns + side.base;
  return inside(offset, length, size) ? Status{} : outside(offset, length, label, size);
}

uint64_t side_bits(const Grid::Side& side, size_t outer) {
  uint64_t bits = side.base | (outer > 1 ? side.outer_stride : 0);
  for (uint64_t index : side.index) bits |= index * side.stride;
  return bits;
}

}  // namespace

Status Plan::of_blocks(const Block* blocks, size_t count, const Bounds& bounds, Plan* plan) {
  uint64_t bits = 0;
  uint64_t bytes = 0;
  bool too_many = false;
  plan->blocks_ = make_block_list(count);
  // What is checked is the copy, while it is in the cache: the caller's rows may change meanwhile.
  for (size_t begin = 0; begin < count;) {
    size_t end = std::min(count, begin + kCheckedAtOnce);
    memcpy(&plan->blocks_[begin], blocks + begin, (end - begin) * sizeof(Block));
    bool wrong = false;  // without a branch for each block
    for (size_t i = begin; i < end; ++i) {
      const Block& block = plan->blocks_[i];
      wrong |= (block.length > bounds.local_length) | (block.length > bounds.remote_length);
      // A difference wraps only with a length that is wrong.
      wrong |= block.local_offset > bounds.local_length - block.length;
      wrong |= block.remote_offset > bounds.remote_length - block.length;
      bits |= block.local_offset | block.remote_offset | block.length;
      bytes += block.length;
      too_many |= bytes < block.length;
    }
    if (wrong) return first_outside(&plan->blocks_[begin], bounds);
    begin = end;
  }
  if (too_many)
    return Status::error(Code::kInvalid, "the blocks have 2^64 bytes or more in all; split the transfer");
  plan->size_ = count;
  plan->bytes_ = bytes;
  plan->alignment_bits_ = bits;
  return {};
}

Status Plan::of_grid(Grid grid, const Bounds& bounds, Plan* plan) {
  size_t count = grid.local.index.size();
  if (count != grid.remote.index.size()) {
    return Status::error(Code::kInvalid, "a grid has " + std::to_string(count) + " local and " +
                                             std::to_string(grid.remote.index.size()) +
                                             " remote indices; it needs as many of each");
  }
  plan->is_grid_ = true;
  if (count == 0 || grid.outer == 0 || grid.length == 0) return {};
  Status status = check_side(grid.local, grid.outer, grid.length, bounds.local_label, bounds.local_length);
  if (!status.ok()) return status;
  status = check_side(grid.remote, grid.outer, grid.length, bounds.remote_label, bounds.remote_length);
  if (!status.ok()) return status;
  Wide bytes = Wide(grid.length) * count * grid.outer;
  if (Wide(count) * grid.outer > std::numeric_limits<size_t>::max() ||
      bytes > std::numeric_limits<uint64_t>::max()) {
    return Status::error(Code::kInvalid, "the grid has 2^64 bytes or more in all; split the transfer");
  }
  plan->size_ = count * grid.outer;
  plan->bytes_ = static_cast<uint64_t>(bytes);
  plan->alignment_bits_ =
      grid.length | side_bits(grid.local, grid.outer) | side_bits(grid.remote, grid.outer);
  plan->grid_ = std::move(grid);
  return {};
}

Block Cursor::cut(const Plan& plan, uint64_t limit, uint64_t hard_limit) {
  Block block = plan.at(next_);
  Block run = {block.local_offset + offset_, block.remote_offset + offset_, block.length - offset_};
  uint64_t tail_limit = std::min(limit + limit / 4, hard_limit);
  if (run.length > tail_limit) {
    run.length = limit;
    offset_ += limit;
    return run;
  }
  for (;;) {
    ++next_;
    offset_ = 0;
    skip_empty(plan);
    if (next_ == plan.size()) return run;
    block = plan.at(next_);
    bool adjacent = run.local_offset + run.length == block.local_offset &&
                    run.remote_offset + run.length == block.remote_offset;
    if (!adjacent || run.length + block.length > limit) return run;
    run.length += block.length;
  }
}

}  // namespace mooncake
