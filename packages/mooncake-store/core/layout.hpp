// Where the bytes of a batch lie on both sides, segment by segment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace mooncake::store {

// One piece of a value: position of the value in the batch, offset inside it, segment, offset there, bytes.
struct Row {
  uint64_t position, inside, segment, offset, nbytes;
};

// What moves in one go: local offset, offset in the segment, bytes.
struct Block {
  uint64_t local, remote, nbytes;
};

using Blocks = std::vector<Block>;

// Blocks by segment, in the order in which the segments come first; the value at a position begins at its
// local offset. Pieces that follow each other on both sides are one block. False when a position has no
// offset.
bool lay_out(const Row* rows, size_t count, const uint64_t* offsets, size_t positions,
             std::vector<std::pair<uint64_t, Blocks>>* found);

}  // namespace mooncake::store
