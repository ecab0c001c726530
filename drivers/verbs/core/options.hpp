// The options of one endpoint, as the engine passes them to open().
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "library.hpp"
#include "mooncake_driver.h"

namespace mooncake::verbs {

inline constexpr uint64_t kMs = 1'000'000;  // of options that are in milliseconds, in nanoseconds

// The defaults are those of options.py, which documents them and renders all of them.
struct Options {
  std::string library;
  std::string device;  // empty: the first that has an active port
  std::string host = "127.0.0.1";
  uint32_t port = 0;  // 0: the first active one
  int32_t gid_index = -1;
  uint32_t control_port = 0;
  uint32_t qps = 2;
  uint32_t send_depth = 128;
  uint32_t completion_depth = 16384;
  uint32_t queue_depth = 8192;
  uint64_t slice_bytes = 1 << 20;
  uint64_t window_bytes = 16 << 20;
  uint32_t inline_bytes = 128;
  uint32_t mtu = 0;
  uint32_t traffic_class = 0;
  uint32_t service_level = 0;
  uint32_t pkey_index = 0;
  uint32_t timeout = 14;
  uint32_t retries = 7;
  uint32_t rd_atomic = 16;
  bool relaxed_ordering = true;
  uint64_t chunk_bytes = 16ull << 30;
  uint32_t registration_threads = 4;
  uint32_t max_connections = 1024;
  uint32_t connect_timeout_ms = 5000;
  uint32_t dead_peer_timeout_ms = 10'000;
};

// MC_INVALID names the first option that is unknown or out of range.
Status parse_options(const mc_option* given, size_t count, Options& options);

}  // namespace mooncake::verbs
