#include "transfer.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>

namespace mooncake {

namespace {

void signal_and_close(int fd) {
  // The counter of an eventfd cannot overflow here; a reader that is gone is no concern of the transfer.
  [[maybe_unused]] int ignored = eventfd_write(fd, 1);
  close(fd);
}

}  // namespace

Transfer::~Transfer() {
  for (int fd : signals_) close(fd);
}

bool Transfer::wait_until(uint64_t deadline_ns) {
  if (done()) return true;
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC on Linux, the clock of now_ns()
  std::unique_lock lock(mutex_);
  return finished_.wait_until(lock, Clock::time_point(std::chrono::nanoseconds(deadline_ns)),
                              [&] { return done(); });
}

Status Transfer::result() const {
  std::lock_guard lock(mutex_);
  return result_;
}

double Transfer::seconds() const {
  std::lock_guard lock(mutex_);
  return static_cast<double>((done() ? finished_ns_ : now_ns()) - started_ns_) * 1e-9;
}

Status Transfer::signal_when_done(int fd) {
  int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0)
    return Status::error(Code::kIo, std::string("cannot duplicate the event descriptor: ") + strerror(errno));
  std::lock_guard lock(mutex_);
  if (done()) {
    signal_and_close(copy);
  } else {
    signals_.push_back(copy);
  }
  return {};
}

void Transfer::note_failure(const Status& status) {
  std::lock_guard lock(mutex_);
  if (result_.ok()) result_ = status;
}

void Transfer::note_attempt(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (std::find(attempts_.begin(), attempts_.end(), reason) == attempts_.end()) attempts_.push_back(reason);
}

std::string Transfer::attempts() const {
  std::lock_guard lock(mutex_);
  std::string joined;
  for (const auto& attempt : attempts_) joined += (joined.empty() ? "" : "; ") + attempt;
  return joined;
}

bool Transfer::finish_ops(uint64_t count) { return remaining_.fetch_sub(count) == count; }

void Transfer::complete() {
  std::vector<int> signals;
  {
    std::lock_guard lock(mutex_);
    finished_ns_ = now_ns();
    done_.store(true, std::memory_order_release);
    signals.swap(signals_);
    finished_.notify_all();
  }
  for (int fd : signals) signal_and_close(fd);
}

}  // namespace mooncake
