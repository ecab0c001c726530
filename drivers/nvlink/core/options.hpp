// The options of one endpoint, as the engine passes them to open().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mooncake_driver.h"
#include "support/status.hpp"

namespace mooncake::nvlink {

// The defaults are those of options.py, which documents them and renders all of them.
struct Options {
  std::string library;  // empty: libcuda.so.1
  uint32_t streams = 4;
  uint64_t queue_depth = 4096;
  uint64_t in_flight_bytes = 256 << 20;
  double answer_timeout_s = 5.0;
  bool allow_other_users = false;
  bool main_memory = true;
  std::string host = "127.0.0.1";
  std::string fabric = "auto";
};

// MC_INVALID names the first option that is unknown or out of range.
driver::Status parse_options(const mc_option* given, size_t count, Options& options);

}  // namespace mooncake::nvlink
