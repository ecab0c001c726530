#include "worker.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace mooncake_tcp {

namespace {

constexpr uint64_t kWakeToken = 0;

int control(int epoll, int operation, int fd, uint64_t token, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  return epoll_ctl(epoll, operation, fd, &event);
}

}  // namespace

Status Worker::start(const std::string& name) {
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Descriptor(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid() ||
      control(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), kWakeToken, EPOLLIN) != 0) {
    return os_error("cannot create an event loop", errno);
  }
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
  std::lock_guard lock(mutex_);
  tasks_.clear();
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

uint64_t Worker::watch(int fd, uint32_t events, Watched* watched, std::shared_ptr<void> owner) {
  uint64_t token = next_token_++;
  if (control(epoll_.get(), EPOLL_CTL_ADD, fd, token, events) != 0) return 0;
  watched_.emplace(token, Entry{watched, std::move(owner)});
  return token;
}

void Worker::change(uint64_t token, int fd, uint32_t events) {
  control(epoll_.get(), EPOLL_CTL_MOD, fd, token, events);
}

void Worker::forget(uint64_t token, int fd) {
  // Explicit, because closing does not remove a socket that a forked child still holds.
  control(epoll_.get(), EPOLL_CTL_DEL, fd, token, 0);
  watched_.erase(token);
  deadlines_.erase(token);
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
  std::vector<Entry> entries;  // a copy: the action may make its object go
  for (const auto& [token, entry] : watched_) entries.push_back(entry);
  for (const Entry& entry : entries) action(*entry.watched);
}

void Worker::run() {
  epoll_event events[64];
  while (!stopping_) {
    int count = epoll_wait(epoll_.get(), events, 64, wait_ms());
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 == kWakeToken) {
        eventfd_t drained;
        [[maybe_unused]] int ignored = eventfd_read(wake_.get(), &drained);
      } else {
        dispatch(events[i].data.u64, events[i].events);
      }
    }
    run_tasks();
    run_again();
    run_deadlines();
  }
  each([](Watched& watched) { watched.on_stop(); });
}

// Looks the token up at the last moment: an earlier event of the same round may have ended the object.
void Worker::dispatch(uint64_t token, uint32_t events) {
  auto found = watched_.find(token);
  if (found == watched_.end()) return;
  Entry entry = found->second;
  entry.watched->on_events(events);
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
  for (uint64_t token : tokens) dispatch(token, 0);
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
    auto found = watched_.find(token);
    if (found == watched_.end()) continue;
    Entry entry = found->second;
    entry.watched->on_deadline();
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
