#include "descriptor.hpp"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace mooncake_tcp {

namespace {

// One bit for each descriptor number. Atomics, because the handler in the child may only do async-signal-safe
// things.
constexpr int kTracked = 1 << 16;
std::atomic<uint64_t> open_fds[kTracked / 64];

void close_in_child() {
  for (size_t word = 0; word < kTracked / 64; ++word) {
    uint64_t bits = open_fds[word].exchange(0);
    for (; bits != 0; bits &= bits - 1) close(static_cast<int>(word * 64) + __builtin_ctzll(bits));
  }
}

[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, close_in_child);

void track(int fd, bool open) {
  if (fd >= kTracked) return;
  uint64_t bit = uint64_t{1} << (fd % 64);
  if (open) {
    open_fds[fd / 64].fetch_or(bit);
  } else {
    open_fds[fd / 64].fetch_and(~bit);
  }
}

}  // namespace

Descriptor::Descriptor(int fd) : fd_(fd) {
  if (fd_ >= 0) track(fd_, true);
}

void Descriptor::reset() {
  if (fd_ < 0) return;
  track(fd_, false);  // before the close: afterwards the number may be somebody else's
  close(fd_);
  fd_ = -1;
}

}  // namespace mooncake_tcp
