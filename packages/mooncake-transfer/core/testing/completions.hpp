// Finished operations of one fake device, and notices of its peers, on their way to its engine.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <stdexcept>
#include <string>

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

  // False when there is no room.
  bool push_notice(const std::string& bytes, bool last, size_t room) {
    std::lock_guard lock(mutex_);
    if (notices_.size() >= room) return false;
    last ? notices_.push_back(bytes) : notices_.push_front(bytes);
    if (armed_) eventfd_write(event_fd_, 1);
    armed_ = false;
    return true;
  }

  size_t poll_notices(mc_notice* out, size_t capacity) {
    std::lock_guard lock(mutex_);
    size_t count = std::min(capacity, notices_.size());
    for (size_t i = 0; i < count; ++i) {
      out[i].length = static_cast<uint32_t>(notices_.front().size());
      out[i].reserved = 0;
      notices_.front().copy(reinterpret_cast<char*>(out[i].data), MC_NOTICE_MAX);
      notices_.pop_front();
    }
    return count;
  }

  // Whether one of this cookie has not been fetched yet.
  bool waits(uint64_t cookie) {
    std::lock_guard lock(mutex_);
    return std::any_of(finished_.begin(), finished_.end(),
                       [&](const mc_completion& completion) { return completion.cookie == cookie; });
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
    if (!finished_.empty() || !notices_.empty()) return false;
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
  std::deque<std::string> notices_;
  bool armed_ = false;
};

}  // namespace mooncake::fake
