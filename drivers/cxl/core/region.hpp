// Memory of this process that the engine registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "layout.hpp"
#include "pool.hpp"

namespace mooncake::cxl {

// What peers may do with a region under one key.
struct RegionKey {
  Digest key;
  uint32_t index;  // of the grant in the pool
  uint64_t generation;
  bool ended = false;
};

// Private memory can be the local side of an operation only.
struct Region {
  uint64_t id = 0;
  std::byte* base = nullptr;
  uint64_t length = 0;
  bool in_pool = false;
  uint64_t offset = 0;  // in the pool

  KeyBlob own{};  // of the memory's own key

  std::mutex mutex;
  std::vector<RegionKey> keys;
};

}  // namespace mooncake::cxl
