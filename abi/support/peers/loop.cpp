#include "loop.hpp"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>
#include <utility>

namespace mooncake::driver {
namespace {

constexpr uint64_t kWakeTag = ~0ull;

}  // namespace

Status Loop::start(const char* name) {
  name_ = name;
  epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
  wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!epoll_.valid() || !wake_.valid())
    return system_failure(MC_IO, "cannot create the service descriptors", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.u64 = kWakeTag;
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) != 0) {
    return system_failure(MC_IO, "cannot watch the service descriptor", errno);
  }
  try {
    thread_ = std::thread([this] { run(); });
  } catch (const std::system_error& error) {
    return failed(MC_NO_MEMORY, std::string("cannot start the service thread: ") + error.what());
  }
  return {};
}

void Loop::stop() {
  if (!thread_.joinable()) return;
  stopping_.store(true);
  eventfd_write(wake_.get(), 1);
  thread_.join();
  // Tasks hold connections alive; their destructors run here, outside the lock.
  std::vector<Task> dropped;
  {
    std::lock_guard lock(mutex_);
    dropped.swap(posted_);
  }
  due_.clear();
  watched_.clear();
}

void Loop::post(Task task) {
  {
    std::lock_guard lock(mutex_);
    posted_.push_back(std::move(task));
    if (posted_.size() > 1) return;  // a wake-up is on its way already
  }
  eventfd_write(wake_.get(), 1);
}

void Loop::at(uint64_t deadline_ns, Task task) { due_.emplace(deadline_ns, std::move(task)); }

bool Loop::watch(int fd, uint32_t epoll_events, Handler handler) {
  uint32_t generation = ++generation_ & 0x7fffffff;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = static_cast<uint64_t>(generation) << 32 | static_cast<uint32_t>(fd);
  if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) return false;
  watched_[fd] = {generation, std::make_shared<Handler>(std::move(handler))};
  return true;
}

void Loop::change(int fd, uint32_t epoll_events) {
  auto found = watched_.find(fd);
  if (found == watched_.end()) return;
  epoll_event event{};
  event.events = epoll_events;
  event.data.u64 = static_cast<uint64_t>(found->second.generation) << 32 | static_cast<uint32_t>(fd);
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Loop::forget(int fd) {
  if (watched_.erase(fd) > 0) epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Loop::run() {
  prepare_thread(name_.c_str());
  std::array<epoll_event, 64> events;
  while (!stopping_.load()) {
    int count = epoll_wait(epoll_.get(), events.data(), events.size(), wait_ms());
    for (int i = 0; i < count; ++i) dispatch(events[i].data.u64, events[i].events);
    run_posted();
    run_due();
  }
}

void Loop::dispatch(uint64_t tag, uint32_t epoll_events) {
  if (tag == kWakeTag) {
    eventfd_t ignored;
    eventfd_read(wake_.get(), &ignored);
    return;
  }
  auto found = watched_.find(static_cast<int>(tag & 0xffffffff));
  if (found == watched_.end() || found->second.generation != tag >> 32) return;
  auto handler = found->second.handler;  // kept alive: it may forget itself
  (*handler)(epoll_events);
}

void Loop::run_posted() {
  std::vector<Task> tasks;
  {
    std::lock_guard lock(mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) task();
}

void Loop::run_due() {
  while (!due_.empty() && due_.begin()->first <= now_ns()) {
    Task task = std::move(due_.begin()->second);
    due_.erase(due_.begin());
    task();
  }
}

int Loop::wait_ms() const {
  if (due_.empty()) return -1;
  uint64_t now = now_ns();
  uint64_t next = due_.begin()->first;
  if (next <= now) return 0;
  return static_cast<int>(std::min<uint64_t>((next - now + 999'999) / 1'000'000, 60'000));
}

}  // namespace mooncake::driver
