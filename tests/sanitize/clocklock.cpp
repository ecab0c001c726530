// ThreadSanitizer of GCC 12 does not see locks taken by pthread_mutex_clocklock, which std::timed_mutex takes
// with steady deadlines. It knows pthread_mutex_timedlock, so that does the work here.
#include <pthread.h>
#include <time.h>

#include <cstdint>

namespace {

constexpr int64_t kSecondNs = 1'000'000'000;

int64_t nanoseconds(const timespec& time) { return time.tv_sec * kSecondNs + time.tv_nsec; }

}  // namespace

extern "C" int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock,
                                       const timespec* until) noexcept {
  timespec here{}, system{};
  clock_gettime(clock, &here);
  clock_gettime(CLOCK_REALTIME, &system);
  int64_t due = nanoseconds(system) + (nanoseconds(*until) - nanoseconds(here));
  if (due < 0) due = 0;
  timespec deadline{due / kSecondNs, due % kSecondNs};
  return pthread_mutex_timedlock(mutex, &deadline);
}
