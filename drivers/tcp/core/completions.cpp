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

void CompletionQueue::push(std::vector<Completion>& completions) {
  if (completions.empty()) return;
  std::lock_guard lock(mutex_);
  for (Completion& completion : completions) waiting_.push_back(std::move(completion));
  count_.store(waiting_.size(), std::memory_order_release);
  if (armed_) {
    armed_ = false;
    // Cannot overflow: arm() takes the count back before each write.
    [[maybe_unused]] int ignored = eventfd_write(event_.get(), 1);
  }
}

size_t CompletionQueue::poll(mc_completion* completions, size_t capacity) {
  if (empty()) return 0;
  std::lock_guard lock(mutex_);
  size_t count = std::min(capacity, waiting_.size());
  for (size_t i = 0; i < count; ++i) {
    const Completion& entry = waiting_.front();
    completions[i].cookie = entry.cookie;
    completions[i].bytes = entry.bytes;
    completions[i].status = entry.status.code;
    size_t length = std::min(entry.status.reason.size(), sizeof(completions[i].reason) - 1);
    memcpy(completions[i].reason, entry.status.reason.data(), length);
    completions[i].reason[length] = '\0';
    waiting_.pop_front();
  }
  count_.store(waiting_.size(), std::memory_order_release);
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
