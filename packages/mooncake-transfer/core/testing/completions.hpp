// Finished operations of one fake device on their way to its engine.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>

#include "memory.hpp"

namespace mooncake::fake {

// Thread-safe. Its mutex is taken last: nothing else is locked while it is held.
class Completions {
 public:
  Completions() : event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (event_fd_ < 0) throw std::runtime_error("no descriptor is free for completions; raise `ulimit -n`");
  }
  ~Completions() { ::close(event_fd_); }

  void push(uint64_t cookie, uint64_t bytes, const Result& result) {
    mc_completion completion{};
    completion.cookie = cookie;
    completion.bytes = bytes;
    completion.status = result.code;
    std::strncpy(completion.reason, result.reason.c_str(), sizeof completion.reason - 1);
    std::lock_guard lock(mutex_);
    finished_.push_back(completion);
    if (armed_) eventfd_write(event_fd_, 1);
    armed_ = false;
  }

  size_t poll(mc_completion* out, size_t capacity) {
    std::lock_guard lock(mutex_);
    size_t count = std::min(capacity, finished_.size());
    std::copy_n(finished_.begin(), count, out);
    finished_.erase(finished_.begin(), finished_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  // Readable from the next completion on, when it returns true. False: some are waiting already.
  bool arm() {
    std::lock_guard lock(mutex_);
    if (!finished_.empty()) return false;
    eventfd_t ignored;
    eventfd_read(event_fd_, &ignored);
    armed_ = true;
    return true;
  }

  int event_fd() const { return event_fd_; }

 private:
  int event_fd_;
  std::mutex mutex_;
  std::deque<mc_completion> finished_;
  bool armed_ = false;
};

}  // namespace mooncake::fake
