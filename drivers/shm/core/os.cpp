#include "os.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <system_error>

namespace mooncake::shm {
namespace {

std::atomic<uint32_t> generation{1};

}  // namespace

Status system_failure(mc_status code, const std::string& what, int error) {
  return failed(code, what + ": " + std::generic_category().message(error));
}

void UniqueFd::reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

uint64_t deadline_after(double seconds) { return now_ns() + static_cast<uint64_t>(seconds * 1e9); }

Status fill_random(void* bytes, size_t length) {
  if (getrandom(bytes, length, 0) != static_cast<ssize_t>(length)) {
    return system_failure(MC_IO, "cannot get random bytes from the kernel", errno);
  }
  return {};
}

bool equal_in_constant_time(const uint8_t* left, const uint8_t* right, size_t length) {
  // volatile: the compiler must not turn the loop into one that stops early.
  volatile uint8_t difference = 0;
  for (size_t i = 0; i < length; ++i) difference = static_cast<uint8_t>(difference | (left[i] ^ right[i]));
  return difference == 0;
}

UniqueFd open_pidfd(pid_t pid) {
  if (pid <= 0) return {};
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

uint32_t fork_generation() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  return registered == 0 ? generation.load(std::memory_order_relaxed) : 0;
}

void prepare_thread(const char* name) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
  pthread_setname_np(pthread_self(), name);
}

}  // namespace mooncake::shm
