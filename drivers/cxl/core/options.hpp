// The options of one endpoint, as the engine passes them to open().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mooncake_driver.h"
#include "os.hpp"
#include "pool.hpp"

namespace mooncake::cxl {

// The defaults are those of options.py, which documents them and renders all of them.
struct Options {
  PoolRequest pool;
  uint32_t workers = 0;  // as many as there are cores for
  uint64_t inline_bytes = 1 << 20;
  uint64_t streaming_bytes = 1 << 20;
  uint64_t chunk_bytes = 256 << 10;
  uint64_t queue_depth = 4096;
};

// MC_INVALID names the first option that is unknown or out of range.
Status parse_options(const mc_option* given, size_t count, Options& options);
Status parse_coherent(const std::string& text, Coherent& coherent);

}  // namespace mooncake::cxl
