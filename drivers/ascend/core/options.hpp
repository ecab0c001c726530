// The options of one endpoint, as the engine passes them to open().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mooncake_driver.h"
#include "support/status.hpp"

namespace mooncake::ascend {

// What HIXL's links go over.
enum class Path { kAuto, kHccs, kRdma };

// The defaults are those of options.py, which documents them and renders all of them.
struct Options {
  std::string library;  // empty: libascendcl.so
  std::string shim;
  uint32_t device = 0;
  std::string host = "127.0.0.1";
  std::string buffer_pool = "4:8";
  Path path = Path::kAuto;
  uint32_t rdma_traffic_class = 132;
  uint32_t rdma_service_level = 4;
  uint64_t queue_depth = 4096;
  uint64_t in_flight_bytes = 64 << 20;
  double answer_timeout_s = 5.0;
  double transfer_timeout_s = 10.0;
  bool allow_other_users = false;
};

// MC_INVALID names the first option that is unknown or out of range.
driver::Status parse_options(const mc_option* given, size_t count, Options& options);

}  // namespace mooncake::ascend
