// What every driver uses of the operating system.
#pragma once

#include <cstdint>

#include "support/os.hpp"

namespace mooncake::nvmeof {

inline constexpr int kRwfDsync = 0x00000002;  // linux/fs.h, which older build machines lack in part

// Rounded to a multiple of `unit`.
inline uint64_t down(uint64_t value, uint64_t unit) { return value / unit * unit; }
inline uint64_t up(uint64_t value, uint64_t unit) { return down(value + unit - 1, unit); }

using driver::deadline_after;
using driver::failed;
using driver::fill_random;
using driver::fork_generation;
using driver::now_ns;
using driver::prepare_thread;
using driver::Status;
using driver::system_failure;
using driver::UniqueFd;

}  // namespace mooncake::nvmeof
