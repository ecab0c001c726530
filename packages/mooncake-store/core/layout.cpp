#include "layout.hpp"

#include <algorithm>

namespace mooncake::store {

namespace {

Blocks& blocks_of(uint64_t segment, std::vector<std::pair<uint64_t, Blocks>>* found) {
  // A batch lies in few segments, and most rows in that of the row before.
  auto there =
      std::find_if(found->rbegin(), found->rend(), [&](auto& entry) { return entry.first == segment; });
  if (there != found->rend()) return there->second;
  return found->emplace_back(segment, Blocks{}).second;
}

}  // namespace

bool lay_out(const Row* rows, size_t count, const uint64_t* offsets, size_t positions,
             std::vector<std::pair<uint64_t, Blocks>>* found) {
  for (const Row* row = rows; row != rows + count; ++row) {
    if (row->position >= positions) return false;
    Blocks& blocks = blocks_of(row->segment, found);
    uint64_t local = offsets[row->position] + row->inside;
    if (!blocks.empty()) {
      Block& last = blocks.back();
      if (last.local + last.nbytes == local && last.remote + last.nbytes == row->offset) {
        last.nbytes += row->nbytes;
        continue;
      }
    }
    blocks.push_back({local, row->offset, row->nbytes});
  }
  return true;
}

}  // namespace mooncake::store
