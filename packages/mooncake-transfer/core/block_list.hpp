// Memory for the blocks of a transfer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace mooncake {

// One run of contiguous bytes: local offset, remote offset, length.
struct Block {
  uint64_t local_offset;
  uint64_t remote_offset;
  uint64_t length;
};

struct GiveBack {
  size_t bytes = 0;
  void operator()(Block* blocks) const;
};

using BlockList = std::unique_ptr<Block[], GiveBack>;

// Room for so many blocks, which hold anything yet. The memory of a long list is kept for the next one, since
// fresh pages take longer than the copy into them. Raises std::bad_alloc.
BlockList make_block_list(size_t count);

}  // namespace mooncake
