#include "completions.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cstring>
#include <utility>

namespace mooncake::shm {

Status Completions::open() {
  event_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!event_.valid()) return system_failure(MC_IO, "cannot create the completion descriptor", errno);
  return {};
}

size_t Completions::reserve(size_t wanted) {
  std::lock_guard lock(mutex_);
  size_t taken = std::min(wanted, depth_ - outstanding_);
  outstanding_ += taken;
  return taken;
}

void Completions::push(std::span<Completion> finished) {
  if (finished.empty()) return;
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    for (Completion& item : finished) {
      ++totals_.ops;
      if (!item.status.ok()) ++totals_.errors;
      (item.opcode == MC_READ ? totals_.bytes_read : totals_.bytes_written) += item.bytes;
      finished_.push_back(std::move(item));
    }
    assert(finished_.size() <= outstanding_);
    wake = std::exchange(armed_, false);
  }
  if (wake) eventfd_write(event_.get(), 1);
}

size_t Completions::poll(mc_completion* out, size_t capacity) {
  std::lock_guard lock(mutex_);
  size_t count = std::min(capacity, finished_.size());
  for (size_t i = 0; i < count; ++i) {
    const Completion& item = finished_.front();
    out[i].cookie = item.cookie;
    out[i].bytes = item.bytes;
    out[i].status = item.status.code;
    size_t length = std::min<size_t>(item.status.reason.size(), MC_REASON_MAX - 1);
    std::memcpy(out[i].reason, item.status.reason.data(), length);
    out[i].reason[length] = 0;
    finished_.pop_front();
  }
  outstanding_ -= count;
  return count;
}

bool Completions::arm() {
  std::lock_guard lock(mutex_);
  if (!finished_.empty()) return false;
  eventfd_t ignored;
  eventfd_read(event_.get(), &ignored);
  armed_ = true;
  return true;
}

void Completions::add_to(mc_stats& stats) const {
  std::lock_guard lock(mutex_);
  stats.ops = totals_.ops;
  stats.bytes_read = totals_.bytes_read;
  stats.bytes_written = totals_.bytes_written;
  stats.errors = totals_.errors;
}

}  // namespace mooncake::shm
