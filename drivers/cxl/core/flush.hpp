// Moving bytes between the caches of this host and memory, where the hardware does not keep several hosts'
// caches alike.
#pragma once

#include <cstddef>

namespace mooncake::cxl {

// Whether this processor can do both, from a user's program.
bool can_flush();
// Writes the lines of the range back to memory, and waits until stores before it are in order with later
// ones.
void write_back(const void* address, size_t length);
// Drops the lines of the range from the caches (dirty ones are written back first), so that later loads see
// memory as it is now.
void drop_lines(const void* address, size_t length);
// Stores before it are visible to others before loads after it are done.
void full_fence();

}  // namespace mooncake::cxl
