// Lets Ctrl-C end a wait inside the core, which knows nothing of Python.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "status.hpp"

namespace mooncake {

// Asked ten times a second, with no lock held, by a thread that waits. Once it says true, what the thread
// does ends as if its deadline had passed.
inline thread_local bool (*interrupted)() = nullptr;

// Until when to sleep before `interrupted` is asked again.
inline uint64_t slice_until(uint64_t deadline_ns, uint64_t slice_ns = 100'000'000) {
  return interrupted == nullptr ? deadline_ns : std::min(deadline_ns, now_ns() + slice_ns);
}

// As condition_variable::wait_until, in such slices.
template <typename Ready>
bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock, uint64_t deadline_ns,
                Ready&& ready) {
  for (;;) {
    uint64_t until = slice_until(deadline_ns);
    std::chrono::steady_clock::time_point at{std::chrono::nanoseconds(until)};
    if (changed.wait_until(lock, at, ready)) return true;
    if (until >= deadline_ns) return false;
    lock.unlock();
    bool ends = interrupted();
    lock.lock();
    if (ends) return ready();
  }
}

// As try_lock_until of a timed mutex, in such slices.
inline bool lock_until(std::unique_lock<std::timed_mutex>& lock, uint64_t deadline_ns) {
  for (;;) {
    uint64_t until = slice_until(deadline_ns);
    std::chrono::steady_clock::time_point at{std::chrono::nanoseconds(until)};
    if (lock.try_lock_until(at)) return true;
    if (until >= deadline_ns || interrupted()) return false;
  }
}

}  // namespace mooncake
