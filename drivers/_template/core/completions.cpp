#include "completions.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace template_driver {

Completions::Completions() : event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (event_fd_ < 0) throw std::runtime_error("no descriptor is free for the completions");
}

Completions::~Completions() { close(event_fd_); }

void Completions::push(const mc_op& op, uint64_t bytes, const Status& status) {
  mc_completion completion{};
  completion.cookie = op.cookie;
  completion.bytes = bytes;
  completion.status = status.code;
  std::strncpy(completion.reason, status.reason.c_str(), sizeof completion.reason - 1);
  std::lock_guard lock(mutex_);
  finished_.push_back(completion);
  ++totals_.ops;
  totals_.errors += status.code != MC_OK;
  (op.opcode == MC_READ ? totals_.bytes_read : totals_.bytes_written) += bytes;
  // One write for however many completions until the engine arms again.
  if (armed_) eventfd_write(event_fd_, 1);
  armed_ = false;
}

size_t Completions::poll(mc_completion* out, size_t capacity) {
  std::lock_guard lock(mutex_);
  size_t count = std::min(capacity, finished_.size());
  std::copy_n(finished_.begin(), count, out);
  finished_.erase(finished_.begin(), finished_.begin() + static_cast<std::ptrdiff_t>(count));
  return count;
}

bool Completions::arm() {
  std::lock_guard lock(mutex_);
  if (!finished_.empty()) return false;
  eventfd_t ignored;
  eventfd_read(event_fd_, &ignored);
  armed_ = true;
  return true;
}

mc_stats Completions::totals() {
  std::lock_guard lock(mutex_);
  return totals_;
}

}  // namespace template_driver
