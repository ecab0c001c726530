// What the core has to tell Python: lines for the log, and transfers that wait to be checked.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "transfer.hpp"

namespace mooncake {

struct Notice {
  enum class Kind { kRailFailed, kRailUnused, kBreakerOpened, kRailRecovered, kDriverFault, kHeld, kFence };
  Kind kind;
  std::string peer;
  std::string rail;
  std::string region;
  std::string text;
  std::shared_ptr<Transfer> transfer;  // of kHeld
  uint64_t token = 0;  // of kFence: which incarnation of the peer; of kHeld: PostOptions::held
};

class Notices {
 public:
  // Lines for the log are dropped when nobody fetches them; what others wait for never is.
  void push(Notice notice) {
    std::lock_guard lock(mutex_);
    if (!waited_for(notice.kind) && notices_.size() >= kLimit) return;
    notices_.push_back(std::move(notice));
    ready_.notify_one();
  }
  // False at the deadline, or when closed.
  bool pop(uint64_t deadline_ns, Notice* notice) {
    using Clock = std::chrono::steady_clock;
    std::unique_lock lock(mutex_);
    ready_.wait_until(lock, Clock::time_point(std::chrono::nanoseconds(deadline_ns)),
                      [&] { return closed_ || !notices_.empty(); });
    if (notices_.empty()) return false;
    *notice = std::move(notices_.front());
    notices_.pop_front();
    return true;
  }
  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    ready_.notify_all();
  }

 private:
  static bool waited_for(Notice::Kind kind) {
    return kind == Notice::Kind::kHeld || kind == Notice::Kind::kFence;
  }

  static constexpr size_t kLimit = 256;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Notice> notices_;
  bool closed_ = false;
};

}  // namespace mooncake
