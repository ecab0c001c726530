// The few operating-system services that every driver uses.
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

#include "status.hpp"

namespace mooncake::driver {

// Owns one file descriptor.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

// Nanoseconds of CLOCK_MONOTONIC, the clock of every deadline in the ABI.
inline uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// A deadline of the ABI for the waits of C++, whose steady clock is the same on Linux; ~0 is for ever.
inline std::chrono::steady_clock::time_point time_point(uint64_t deadline_ns) {
  auto most = static_cast<uint64_t>(std::chrono::nanoseconds::max().count());
  return std::chrono::steady_clock::time_point(
      std::chrono::nanoseconds(static_cast<int64_t>(std::min(deadline_ns, most))));
}

inline uint64_t deadline_after(double seconds) { return now_ns() + static_cast<uint64_t>(seconds * 1e9); }

// Tells the processor that this thread spins.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// For locks that are held for less than a microsecond: whoever sleeps for one is awake only some 30 us later.
inline std::unique_lock<std::mutex> lock_soon(std::mutex& mutex) {
  for (int looks = 0; looks < 100; ++looks) {
    if (std::unique_lock lock(mutex, std::try_to_lock); lock.owns_lock()) return lock;
    relax();
  }
  return std::unique_lock(mutex);
}

// Whether no one can cut the file short any more: only then is touching a mapping of it free of SIGBUS.
inline bool sealed_against_shrinking(int fd) {
  int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

inline Status fill_random(void* bytes, size_t length) {
  if (getrandom(bytes, length, 0) == static_cast<ssize_t>(length)) return {};
  return system_failure(MC_IO, "cannot get random bytes from the kernel", errno);
}

// Its time does not tell how many leading bytes are equal.
inline bool equal_in_constant_time(const uint8_t* left, const uint8_t* right, size_t length) {
  // volatile: the compiler must not turn the loop into one that stops early.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < length; ++i) difference = static_cast<uint8_t>(difference | (left[i] ^ right[i]));
  return difference == 0;
}

// Changes in a forked child. Getting it is a load, where getpid() is a system call.
inline uint32_t fork_generation() {
  static std::atomic<uint32_t> generation{1};
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  return registered == 0 ? generation.load(std::memory_order_relaxed) : 0;
}

// The object of this type that the process has but one of. A forked child makes its own: a thread of the
// parent may have held a lock of the other at the fork, for ever. Never destroyed: calls come until the
// process ends.
template <class Object>
Object& of_this_process() {
  struct Owned {
    uint32_t generation;
    Object object{};
  };
  static std::atomic<Owned*> current{nullptr};
  Owned* found = current.load(std::memory_order_acquire);
  if (found != nullptr && found->generation == fork_generation()) return found->object;
  auto* made = new Owned{.generation = fork_generation()};
  if (current.compare_exchange_strong(found, made)) return made->object;
  delete made;
  return found->object;
}

// For threads of a driver: names the thread and leaves signals to the threads of the application.
inline void prepare_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace mooncake::driver
