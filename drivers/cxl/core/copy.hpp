// Copying bytes within the address space, with the store instructions that suit the amount.
#pragma once

#include <cstddef>

namespace mooncake::cxl {

enum class Stores {
  kCached,     // the bytes are likely to be read soon and fit the cache
  kStreaming,  // past the cache: saves reading each destination line before it is overwritten, and reads from
               // four pages in turns, which keeps more of the memory's banks and prefetchers busy
};

// The ranges do not overlap. When it returns, other threads and processes that map the memory see the bytes.
void copy_bytes(void* destination, const void* source, size_t length, Stores stores);

}  // namespace mooncake::cxl
