#include "waiter.hpp"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

namespace mooncake::ep::pg {

namespace {

// A process that dies rings no bell: sleepers look after this time, longer the longer nothing happens.
constexpr long kShortestSleepNs = 500'000, kLongestSleepNs = 4'000'000;
constexpr uint32_t kSleepsPerInterrupt = 8;

}  // namespace

void Waiter::announce(bool sleeping) {
  auto& word = control_.header().sleeping[rank_ / 64];
  uint64_t bit = uint64_t{1} << (rank_ % 64);
  if (sleeping) {
    word.fetch_or(bit);
  } else {
    word.fetch_and(~bit);
  }
}

void Waiter::sleep(uint32_t heard) {
  timespec time{0, std::min(kShortestSleepNs << std::min(sleeps_, 4u), kLongestSleepNs)};
  ++sleeps_;
  auto* bell = reinterpret_cast<uint32_t*>(&control_.header().bell);
  syscall(SYS_futex, bell, FUTEX_WAIT, heard, &time, nullptr, 0);
}

void Waiter::check_interrupted() {
  if (interrupted_ != nullptr && sleeps_ % kSleepsPerInterrupt == 0 && interrupted_()) {
    throw Stop(Code::kInterrupted,
               "a signal ended the wait; this rank left the group: join_group() comes back");
  }
}

void Waiter::ring(const Control& control) {
  control.header().bell.fetch_add(1);
  auto* bell = reinterpret_cast<uint32_t*>(&control.header().bell);
  syscall(SYS_futex, bell, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

uint32_t spins_for(size_t ranks) {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  bool known = sched_getaffinity(0, sizeof cores, &cores) == 0;
  size_t count = known ? static_cast<size_t>(CPU_COUNT(&cores)) : 1;
  return ranks <= count ? 2000 : 50;
}

}  // namespace mooncake::ep::pg
