#include "completions.hpp"

#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>

namespace mooncake_tcp {

namespace {
// Bounds the memory that operations and completions can take: about 30 MB.
constexpr size_t kMaxOutstanding = 1u << 16;
}  // namespace

Status CompletionQueue::open() {
  event_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  return event_.valid() ? Status{} : os_error("cannot create an event descriptor", errno);
}

size_t CompletionQueue::reserve(size_t wanted) {
  std::lock_guard lock(mutex_);
  size_t granted = std::min(wanted, kMaxOutstanding - outstanding_);
  outstanding_ += granted;
  return granted;
}

void CompletionQueue::give_back(size_t unused) {
  std::lock_guard lock(mutex_);
  outstanding_ -= unused;
}

void CompletionQueue::push(uint64_t cookie, uint64_t bytes, const Status& status) {
  mc_completion completion{};
  completion.cookie = cookie;
  completion.bytes = bytes;
  completion.status = status.code;
  size_t length = std::min(status.reason.size(), sizeof(completion.reason) - 1);
  memcpy(completion.reason, status.reason.data(), length);
  std::lock_guard lock(mutex_);
  waiting_.push_back(completion);
  if (armed_) {
    armed_ = false;
    // Cannot overflow: arm() takes the count back before each write.
    [[maybe_unused]] int ignored = eventfd_write(event_.get(), 1);
  }
}

size_t CompletionQueue::poll(mc_completion* completions, size_t capacity) {
  std::lock_guard lock(mutex_);
  size_t count = std::min(capacity, waiting_.size());
  for (size_t i = 0; i < count; ++i) {
    completions[i] = waiting_.front();
    waiting_.pop_front();
  }
  outstanding_ -= count;
  return count;
}

bool CompletionQueue::arm() {
  std::lock_guard lock(mutex_);
  if (!waiting_.empty()) return false;
  if (!armed_) {
    eventfd_t drained;
    [[maybe_unused]] int ignored = eventfd_read(event_.get(), &drained);
    armed_ = true;
  }
  return true;
}

}  // namespace mooncake_tcp
