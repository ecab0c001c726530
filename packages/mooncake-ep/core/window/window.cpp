#include "window.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <climits>
#include <ctime>
#include <system_error>
#include <utility>

#include "support/os.hpp"

namespace mooncake::ep {

namespace {

constexpr int kSpins = 500, kYields = 200;
// A sleeper looks up this often whether the writer lives; the kernel wakes it when the word changes.
constexpr int64_t kLongestSleepNs = 5'000'000;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Futexes are of 32 bits: the low half of a word, which changes whenever the word does.
void* low_half(std::atomic<uint64_t>& word) {
  static_assert(std::endian::native == std::endian::little);
  return &word;
}

}  // namespace

bool has_died(int pidfd) {
  pollfd asked{pidfd, POLLIN, 0};
  return pidfd >= 0 && poll(&asked, 1, 0) == 1;
}

Window Window::map(int fd, size_t bytes) {
  void* found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (found == MAP_FAILED) {
    int reason = errno;
    close(fd);
    errno = reason;
    fail("mmap");
  }
  madvise(found, bytes, MADV_DONTDUMP);
  return Window(fd, static_cast<std::byte*>(found), bytes);
}

Window Window::create(size_t bytes) {
  int fd = memfd_create("mooncake-ep", MFD_CLOEXEC);
  if (fd < 0) fail("memfd_create");
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    int reason = errno;
    close(fd);
    errno = reason;
    fail("ftruncate");
  }
  return map(fd, bytes);
}

Window Window::open(const std::string& path, size_t bytes) {
  int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) fail("open");
  return map(fd, bytes);
}

Window::Window(Window&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}

Window::~Window() {
  if (data_ != nullptr) munmap(data_, bytes_);
  if (fd_ >= 0) close(fd_);
}

void Window::store(size_t word, uint64_t value) {
  at(word).store(value << 1, std::memory_order_seq_cst);
  wake(word);
}

bool Window::post(size_t word, uint64_t value) {
  uint64_t seen = at(word).load(std::memory_order_acquire);
  do {
    if (seen & kEnded) return false;
  } while (!at(word).compare_exchange_weak(seen, value << 1, std::memory_order_seq_cst));
  wake(word);
  return true;
}

bool Window::end(size_t word, uint64_t least) {
  uint64_t seen = at(word).load(std::memory_order_acquire);
  do {
    if (seen >> 1 >= least) return false;
    if (seen & kEnded) return true;
  } while (!at(word).compare_exchange_weak(seen, seen | kEnded, std::memory_order_seq_cst));
  wake(word);
  return true;
}

void Window::wake(size_t word) {
  // A sleeper counts itself before it looks at the word for the last time, so one of the two sees the other.
  if (at(kSleepersWord).load(std::memory_order_seq_cst) == 0) return;
  syscall(SYS_futex, low_half(at(word)), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Window::spin(size_t word, uint64_t least) const {
  for (int i = 0; i < kSpins; ++i, pause_briefly()) {
    if (load(word) >= least) return true;
  }
  for (int i = 0; i < kYields; ++i, sched_yield()) {
    if (load(word) >= least) return true;
  }
  return false;
}

void Window::sleep(size_t word, uint64_t seen, int64_t ns) {
  timespec limit{ns / 1'000'000'000, ns % 1'000'000'000};
  at(kSleepersWord).fetch_add(1, std::memory_order_seq_cst);
  if (at(word).load(std::memory_order_seq_cst) == seen) {
    syscall(SYS_futex, low_half(at(word)), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit, nullptr, 0);
  }
  at(kSleepersWord).fetch_sub(1, std::memory_order_seq_cst);
}

Waited Window::wait(size_t word, uint64_t least, int64_t deadline_ns, int pidfd) {
  if (spin(word, least)) return Waited::kReached;
  for (;;) {
    // The order matters: what a writer did before it died is done.
    bool died = has_died(pidfd);
    uint64_t seen = at(word).load(std::memory_order_acquire);
    if (seen >> 1 >= least) return Waited::kReached;
    if (seen & kEnded) return Waited::kEnded;
    if (died) return Waited::kDied;
    int64_t left = deadline_ns - now_ns();
    if (left <= 0) return Waited::kTimedOut;
    sleep(word, seen, std::min(left, kLongestSleepNs));
  }
}

}  // namespace mooncake::ep
