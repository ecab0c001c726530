// Finished operations on their way to the engine.
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "mooncake_driver.h"
#include "os.hpp"
#include "status.hpp"

namespace mooncake::driver {

struct Completion {
  uint64_t cookie = 0;
  uint64_t bytes = 0;
  mc_opcode opcode = MC_READ;
  mc_status code = MC_OK;
  std::unique_ptr<std::string> reason;  // null when code is MC_OK

  void fail(const Status& status) {
    code = status.code;
    reason = std::make_unique<std::string>(status.reason);
  }
};

// Thread-safe. Counts what is on its way, so that a submitter that never polls is told to.
class Completions {
 public:
  explicit Completions(size_t depth) : depth_(depth) {}

  Status open();

  // How many of `wanted` operations there is room for; each of them must be pushed once.
  size_t reserve(size_t wanted);
  void push(std::span<Completion> finished) { add(finished, true); }
  // The same by who calls poll() next, or finds in arm() that something waits: nobody is woken for it.
  void push_quietly(std::span<Completion> finished) { add(finished, false); }

  size_t poll(mc_completion* out, size_t capacity);
  // Wakes whoever armed it, for something that is no completion.
  void signal();
  bool any() const { return waiting_.load(std::memory_order_relaxed) > 0; }
  // False when completions wait already. Otherwise the descriptor becomes readable with the next one.
  bool arm();
  int event_fd() const { return event_.get(); }
  void add_to(mc_stats& stats) const;

 private:
  void add(std::span<Completion> finished, bool wake);

  const size_t depth_;
  UniqueFd event_;
  std::atomic<size_t> outstanding_{0};  // accepted and not polled
  std::atomic<size_t> waiting_{0};      // finished and not polled; changes under the lock only
  mutable std::mutex mutex_;
  // From `head_` on. It begins at the front again whenever it is empty, which keeps it in the cache.
  std::vector<Completion> finished_;
  size_t head_ = 0;
  bool armed_ = false;
  bool signalled_ = false;
  mc_stats totals_{};
};

inline Status Completions::open() {
  event_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_.valid()) return system_failure(MC_IO, "cannot create the completion descriptor", errno);
  return {};
}

inline size_t Completions::reserve(size_t wanted) {
  size_t before = outstanding_.fetch_add(wanted, std::memory_order_relaxed);
  size_t taken = before >= depth_ ? 0 : std::min(wanted, depth_ - before);
  if (taken < wanted) outstanding_.fetch_sub(wanted - taken, std::memory_order_relaxed);
  return taken;
}

inline void Completions::add(std::span<Completion> finished, bool wake) {
  if (finished.empty()) return;
  auto lock = lock_soon(mutex_);
  for (Completion& item : finished) {
    ++totals_.ops;
    totals_.errors += item.code != MC_OK;
    (item.opcode == MC_READ ? totals_.bytes_read : totals_.bytes_written) += item.bytes;
    finished_.push_back(std::move(item));
  }
  waiting_.store(finished_.size() - head_, std::memory_order_release);
  // With the lock held: a later arm() must find the descriptor written, or it could not make it unreadable.
  if (wake && std::exchange(armed_, false)) {
    eventfd_write(event_.get(), 1);
    signalled_ = true;
  }
}

inline size_t Completions::poll(mc_completion* out, size_t capacity) {
  if (waiting_.load(std::memory_order_acquire) == 0) return 0;
  auto lock = lock_soon(mutex_);
  size_t count = std::min(capacity, finished_.size() - head_);
  for (size_t i = 0; i < count; ++i) {
    Completion& item = finished_[head_ + i];
    out[i].cookie = item.cookie;
    out[i].bytes = item.bytes;
    out[i].status = item.code;
    size_t length = item.reason ? std::min<size_t>(item.reason->size(), MC_REASON_MAX - 1) : 0;
    if (length > 0) std::memcpy(out[i].reason, item.reason->data(), length);
    out[i].reason[length] = 0;
    item.reason.reset();
  }
  head_ += count;
  if (head_ == finished_.size()) {
    finished_.clear();
    head_ = 0;
  } else if (head_ >= depth_) {  // a queue that is never empty must not grow for ever
    finished_.erase(finished_.begin(), finished_.begin() + static_cast<ptrdiff_t>(head_));
    head_ = 0;
  }
  waiting_.store(finished_.size() - head_, std::memory_order_relaxed);
  [[maybe_unused]] size_t before = outstanding_.fetch_sub(count, std::memory_order_relaxed);
  assert(before >= count);
  return count;
}

inline void Completions::signal() {
  auto lock = lock_soon(mutex_);
  if (!std::exchange(armed_, false)) return;
  eventfd_write(event_.get(), 1);
  signalled_ = true;
}

inline bool Completions::arm() {
  auto lock = lock_soon(mutex_);
  if (finished_.size() > head_) return false;
  if (std::exchange(signalled_, false)) {
    eventfd_t ignored;
    eventfd_read(event_.get(), &ignored);
  }
  armed_ = true;
  return true;
}

inline void Completions::add_to(mc_stats& stats) const {
  auto lock = lock_soon(mutex_);
  stats.ops = totals_.ops;
  stats.bytes_read = totals_.bytes_read;
  stats.bytes_written = totals_.bytes_written;
  stats.errors = totals_.errors;
}

}  // namespace mooncake::driver
