// The options of one endpoint, as the engine passes them to open().
#pragma once

#include <cstdint>
#include <string>

#include "mooncake_driver.h"
#include "support/os.hpp"
#include "support/status.hpp"

namespace mooncake::efa {

using driver::failed;
using driver::now_ns;
using driver::Status;

// Nanoseconds from one time to another; none when that is still to come.
inline uint64_t passed(uint64_t since_ns, uint64_t now) { return now > since_ns ? now - since_ns : 0; }

// The defaults are those of options.py, which documents them and renders all of them.
struct Options {
  std::string provider = "efa";
  std::string domain;
  std::string library;
  uint64_t queue_depth = 4096;
  uint32_t endpoints = 64;
  uint32_t spin_us = 50;
  double connect_timeout_s = 5.0;
  double dead_peer_timeout_s = 6.0;
};

// MC_INVALID names the first option that is unknown or out of range.
Status parse_options(const mc_option* given, size_t count, Options& options);

}  // namespace mooncake::efa
