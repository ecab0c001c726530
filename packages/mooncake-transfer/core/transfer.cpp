#include "transfer.hpp"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

namespace mooncake {

namespace {

// The counter of an eventfd cannot overflow here; a reader that is gone is no concern of the transfer.
void signal(int fd) { [[maybe_unused]] int ignored = eventfd_write(fd, 1); }

}  // namespace

Transfer::Transfer(mc_opcode opcode, Plan plan, std::shared_ptr<Region> local,
                   std::shared_ptr<RemoteRegion> remote, uint64_t rails)
    : opcode(opcode),
      plan(std::move(plan)),
      local(std::move(local)),
      remote(std::move(remote)),
      rails(rails),
      bytes_on_rail_(this->remote->peer()->rails().size()) {}

Transfer::~Transfer() {
  for (int fd : signals_) close(fd);
}

std::string Transfer::label() const {
  return (opcode == MC_WRITE ? "write to " : "read from ") + remote->label();
}

bool Transfer::begin(const PostOptions& post) {
  State was = state();
  if (was == State::kRunning || !state_.compare_exchange_strong(was, State::kRunning)) return false;
  if (was == State::kDone) {
    std::lock_guard lock(mutex_);
    result_ = {};
    failed_ = false;
    attempts_.clear();
    bytes_done_ = 0;
    for (auto& bytes : bytes_on_rail_) bytes = 0;
  }
  cancelled = false;
  finishing = false;
  resting = false;
  checked = false;
  failed_questions = kNotAsked;
  turn_slices = 0;
  turn_bytes = 0;
  options = post;
  cursor.reset(plan);
  started_ns_ = now_ns();
  return true;
}

bool Transfer::wait_until(uint64_t deadline_ns) {
  if (state() != State::kRunning) return true;
  using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC on Linux, the clock of now_ns()
  std::unique_lock lock(mutex_);
  watchers_.fetch_add(1);
  bool ended = finished_.wait_until(lock, Clock::time_point(std::chrono::nanoseconds(deadline_ns)),
                                    [&] { return state_.load() != State::kRunning; });
  watchers_.fetch_sub(1);
  return ended;
}

Status Transfer::result() const {
  std::lock_guard lock(mutex_);
  return result_;
}

double Transfer::seconds() const {
  if (state() == State::kPrepared) return 0;
  return static_cast<double>((done() ? finished_ns_.load() : now_ns()) - started_ns_) * 1e-9;
}

Status Transfer::signal_when_done(int fd) {
  int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0)
    return Status::error(Code::kIo, std::string("cannot duplicate the event descriptor: ") + strerror(errno));
  std::lock_guard lock(mutex_);
  watchers_.fetch_add(1);  // before the look at the state: complete() looks at the watchers after it
  signals_.push_back(copy);
  if (state_.load() == State::kRunning) return {};
  watchers_.fetch_sub(1);
  signals_.pop_back();
  signal(copy);
  close(copy);
  return {};
}

bool Transfer::wake(int fd) {
  std::lock_guard lock(mutex_);
  watchers_.fetch_add(1);
  if (state_.load() == State::kRunning) {
    wakes_.push_back(fd);
    return true;
  }
  watchers_.fetch_sub(1);
  return false;
}

void Transfer::unwake(int fd) {
  std::lock_guard lock(mutex_);
  auto found = std::find(wakes_.begin(), wakes_.end(), fd);
  if (found == wakes_.end()) return;
  wakes_.erase(found);
  watchers_.fetch_sub(1);
}

void Transfer::note_failure(const Status& status) {
  std::lock_guard lock(mutex_);
  if (result_.ok()) result_ = status;
  failed_ = true;
}

void Transfer::forgive() {
  if (ok()) return;
  std::lock_guard lock(mutex_);
  failed_ = false;
  result_ = {};
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

void Transfer::complete(uint64_t now) {
  finished_ns_.store(now, std::memory_order_relaxed);
  state_.store(State::kDone);  // sequentially consistent, as the watchers' counting: one sees the other
  if (watchers_.load() == 0) return;
  std::lock_guard lock(mutex_);
  for (int fd : signals_) {
    signal(fd);
    close(fd);
  }
  for (int fd : wakes_) signal(fd);
  watchers_.fetch_sub(static_cast<uint32_t>(signals_.size() + wakes_.size()));
  signals_.clear();
  wakes_.clear();
  finished_.notify_all();
}

}  // namespace mooncake
