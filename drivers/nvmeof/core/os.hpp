// What every driver uses of the operating system.
#pragma once

#include "support/os.hpp"

namespace mooncake::nvmeof {

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
