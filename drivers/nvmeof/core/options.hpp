// Settings of one endpoint; options.py says what they mean.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mooncake_driver.h"
#include "nvme_controller.hpp"
#include "os.hpp"

namespace mooncake::nvmeof {

struct Options {
  std::string io = "auto";  // auto, io_uring, threads
  bool direct = true;
  bool durable = false;
  bool polled = false;
  bool passthrough = false;
  bool gpudirect = false;
  bool register_buffers = true;
  uint64_t in_flight = 64;
  uint64_t chunk_bytes = 1 << 20;
  uint32_t workers = 8;
  uint64_t queue_depth = 1024;
  std::string host;  // empty: peers of this host only
  nvme::Settings nvme;
};

Status parse_options(const mc_option* given, size_t count, Options& options);

}  // namespace mooncake::nvmeof
