// The options of one endpoint, as the engine passes them to open().
#pragma once

#include <cstddef>
#include <cstdint>

#include "mooncake_driver.h"
#include "os.hpp"

namespace mooncake::shm {

// The defaults are those of options.py, which documents them and renders all of them.
struct Options {
  uint32_t workers = 0;  // as many as there are cores for
  uint64_t inline_bytes = 1 << 20;
  uint64_t streaming_bytes = 1 << 20;
  uint64_t chunk_bytes = 2 << 20;
  uint64_t queue_depth = 4096;
  double answer_timeout_s = 5.0;
  bool allow_other_users = false;
};

// MC_INVALID names the first option that is unknown or out of range.
Status parse_options(const mc_option* given, size_t count, Options& options);

}  // namespace mooncake::shm
