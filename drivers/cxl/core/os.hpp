// What every part of the driver uses of the shared support code.
#pragma once

#include "support/copy.hpp"
#include "support/os.hpp"

namespace mooncake::cxl {

using driver::copy_bytes;
using driver::deadline_after;
using driver::equal_in_constant_time;
using driver::failed;
using driver::fill_random;
using driver::fork_generation;
using driver::now_ns;
using driver::prepare_thread;
using driver::Status;
using driver::Stores;
using driver::system_failure;
using driver::UniqueFd;

}  // namespace mooncake::cxl
