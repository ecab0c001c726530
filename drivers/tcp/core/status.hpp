// Results inside the driver. Exceptions end at the C function table (driver.cpp).
#pragma once

#include <cstdint>
#include <cstring>
#include <ctime>
#include <string>
#include <utility>

#include "mooncake_driver.h"

namespace mooncake_tcp {

struct Status {
  mc_status code = MC_OK;
  std::string reason;

  bool ok() const { return code == MC_OK; }
};

inline Status os_error(const std::string& what, int error) { return {MC_IO, what + ": " + strerror(error)}; }

// CLOCK_MONOTONIC in nanoseconds, as the driver ABI counts deadlines.
inline uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace mooncake_tcp
