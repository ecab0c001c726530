// What every driver uses of the operating system, and what this one adds.
#pragma once

#include <sys/types.h>

#include "support/copy.hpp"
#include "support/os.hpp"

namespace mooncake::shm {

using driver::copy_bytes;
using driver::deadline_after;
using driver::equal_in_constant_time;
using driver::failed;
using driver::fill_random;
using driver::fork_generation;
using driver::lock_soon;
using driver::now_ns;
using driver::prepare_thread;
using driver::relax;
using driver::Status;
using driver::Stores;
using driver::system_failure;
using driver::UniqueFd;

// A descriptor that becomes readable when the process ends; invalid where the kernel or the namespace has
// none.
UniqueFd open_pidfd(pid_t pid);

}  // namespace mooncake::shm
