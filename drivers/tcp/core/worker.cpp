#include "worker.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace mooncake_tcp {

uint64_t SpinBudget::ns(uint64_t now) {
  if (now < off_until_ns_) return 0;
  if (pauses_ == 0) return kMostNs;
  --pauses_;
  return 0;
}

void SpinBudget::looked(bool found) {
  if (found) {
    misses_ = 0;
    next_pauses_ = kFewestPauses;
  } else if (++misses_ > 1) {
    pauses_ = std::exchange(next_pauses_, std::min(next_pauses_ * 2, kMostPauses));
  }
}

Status Worker::start(const std::string& name) {
  Status opened = poller_.open();
  if (!opened.ok()) return opened;
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (wake_.valid()) wake_token_ = poller_.watch(wake_.get(), EPOLLIN, nullptr, nullptr);
  if (wake_token_ == 0) return os_error("cannot create an event loop", errno);
  // Signals belong to the threads of the program, never to ours.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  Status status;
  try {
    thread_ = std::thread([this] { run(); });
    pthread_setname_np(thread_.native_handle(), name.c_str());
  } catch (const std::system_error& error) {
    status = os_error("cannot start a thread", error.code().value());
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return status;
}

void Worker::stop() {
  stopping_ = true;
  if (thread_.joinable()) {
    [[maybe_unused]] int ignored = eventfd_write(wake_.get(), 1);
    thread_.join();
  }
  std::vector<Task> dropped;
  std::lock_guard lock(mutex_);
  dropped.swap(tasks_);
}

void Worker::post(Task task) {
  bool first;
  {
    std::lock_guard lock(mutex_);
    first = tasks_.empty();
    tasks_.push_back(std::move(task));
  }
  if (first) {
    [[maybe_unused]] int ignored = eventfd_write(wake_.get(), 1);
  }
}

void Worker::set_deadline(uint64_t token, uint64_t deadline_ns) {
  if (deadline_ns == 0) {
    deadlines_.erase(token);
  } else {
    deadlines_[token] = deadline_ns;
  }
}

void Worker::again(uint64_t token) { again_.push_back(token); }

void Worker::each(const std::function<void(Watched&)>& action) {
  // A copy: the action may make its object go.
  for (const Poller::Entry& entry : poller_.entries()) action(*entry.watched);
}

void Worker::run() {
  epoll_event events[64];
  while (!stopping_) {
    int count = wait(events, 64);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == wake_token_) {
        eventfd_t drained;
        [[maybe_unused]] int ignored = eventfd_read(wake_.get(), &drained);
      } else {
        poller_.dispatch(events[i].data.u64, events[i].events);
      }
    }
    run_tasks();
    run_again();
    run_deadlines();
  }
  each([](Watched& watched) { watched.on_stop(); });
}

// Looks for a while, then sleeps.
int Worker::wait(epoll_event* events, int most) {
  int count = poller_.wait(events, most, 0);
  if (count > 0 || !again_.empty()) return count;
  uint64_t now = now_ns();
  uint64_t budget = spin_.ns(now);
  if (budget == 0) return poller_.wait(events, most, wait_ms());
  for (uint64_t until = now + budget; count == 0 && now < until;) {
    count = poller_.wait(events, most, 0);
    uint64_t later = now_ns();
    if (later - now > SpinBudget::kLostCoreNs) spin_.lost_core(later);
    now = later;
  }
  spin_.looked(count > 0);
  return count != 0 ? count : poller_.wait(events, most, wait_ms());
}

void Worker::run_tasks() {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(tasks_);
  }
  for (Task& task : tasks) task();
}

void Worker::run_again() {
  std::vector<uint64_t> tokens;
  tokens.swap(again_);
  for (uint64_t token : tokens) poller_.dispatch(token, 0);
}

void Worker::run_deadlines() {
  if (deadlines_.empty()) return;
  uint64_t now = now_ns();
  std::vector<uint64_t> due;
  for (const auto& [token, deadline] : deadlines_) {
    if (deadline <= now) due.push_back(token);
  }
  for (uint64_t token : due) {
    deadlines_.erase(token);
    Poller::Entry entry = poller_.find(token);
    if (entry.watched != nullptr) entry.watched->on_deadline();
  }
}

int Worker::wait_ms() const {
  if (!again_.empty()) return 0;
  if (deadlines_.empty()) return -1;
  uint64_t now = now_ns();
  uint64_t nearest = ~uint64_t{0};
  for (const auto& [token, deadline] : deadlines_) nearest = std::min(nearest, deadline);
  if (nearest <= now) return 0;
  return static_cast<int>(std::min<uint64_t>((nearest - now) / 1'000'000 + 1, 60'000));
}

}  // namespace mooncake_tcp
