// The few operating-system services that every part of the driver uses.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "status.hpp"

namespace mooncake::shm {

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
  void reset(int fd = -1);

 private:
  int fd_ = -1;
};

// Nanoseconds of CLOCK_MONOTONIC, the clock of every deadline in the ABI.
uint64_t now_ns();
uint64_t deadline_after(double seconds);

Status fill_random(void* bytes, size_t length);

// Its time does not tell how many leading bytes are equal.
bool equal_in_constant_time(const uint8_t* left, const uint8_t* right, size_t length);

// A descriptor that becomes readable when the process ends; invalid where the kernel or the namespace has
// none.
UniqueFd open_pidfd(pid_t pid);

// Changes in a forked child. Getting it is a load, where getpid() is a system call. 0 when there was no
// memory to keep watch.
uint32_t fork_generation();

// For threads of the driver: names the thread and leaves signals to the threads of the application.
void prepare_thread(const char* name);

}  // namespace mooncake::shm
