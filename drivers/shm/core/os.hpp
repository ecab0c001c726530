// What every driver uses of the operating system, and what this one adds.
#pragma once

#include "support/copy.hpp"
#include "support/os.hpp"
#include "support/peers/address.hpp"
#include "support/peers/loop.hpp"

namespace mooncake::shm {

using driver::Address;
using driver::copy_bytes;
using driver::deadline_after;
using driver::equal_in_constant_time;
using driver::failed;
using driver::fill_random;
using driver::fork_generation;
using driver::kSecretBytes;
using driver::lock_soon;
using driver::Loop;
using driver::now_ns;
using driver::open_pidfd;
using driver::prepare_thread;
using driver::relax;
using driver::sealed_against_shrinking;
using driver::Status;
using driver::Stores;
using driver::system_failure;
using driver::UniqueFd;

}  // namespace mooncake::shm
