#include "poller.hpp"

#include <cerrno>

namespace mooncake_tcp {

namespace {

int control(int epoll, int operation, int fd, uint64_t token, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.u64 = token;
  return epoll_ctl(epoll, operation, fd, &event);
}

}  // namespace

Status Poller::open() {
  epoll_ = Descriptor(epoll_create1(EPOLL_CLOEXEC));
  return epoll_.valid() ? Status{} : os_error("cannot create an event loop", errno);
}

uint64_t Poller::watch(int fd, uint32_t events, Watched* watched, std::shared_ptr<void> owner) {
  std::lock_guard lock(mutex_);
  uint64_t token = next_token_++;
  if (control(epoll_.get(), EPOLL_CTL_ADD, fd, token, events) != 0) return 0;
  if (watched != nullptr) watched_.emplace(token, Entry{watched, std::move(owner)});
  return token;
}

void Poller::change(uint64_t token, int fd, uint32_t events) {
  control(epoll_.get(), EPOLL_CTL_MOD, fd, token, events);
}

void Poller::forget(uint64_t token, int fd) {
  // Explicit, because closing does not remove a socket that a forked child still holds.
  control(epoll_.get(), EPOLL_CTL_DEL, fd, token, 0);
  Entry last{};  // released after the lock
  std::lock_guard lock(mutex_);
  auto found = watched_.find(token);
  if (found == watched_.end()) return;
  last = std::move(found->second);
  watched_.erase(found);
}

int Poller::wait(epoll_event* events, int most, int timeout_ms) const {
  return epoll_wait(epoll_.get(), events, most, timeout_ms);
}

Poller::Entry Poller::find(uint64_t token) const {
  std::lock_guard lock(mutex_);
  auto found = watched_.find(token);
  return found == watched_.end() ? Entry{} : found->second;
}

bool Poller::dispatch(uint64_t token, uint32_t events) {
  Entry entry = find(token);
  if (entry.watched == nullptr) return false;
  entry.watched->on_events(events);
  return true;
}

bool Poller::progress() {
  epoll_event events[16];
  int count = wait(events, 16, 0);
  bool any = false;
  for (int i = 0; i < count; ++i) any |= dispatch(events[i].data.u64, events[i].events);
  return any;
}

std::vector<Poller::Entry> Poller::entries() const {
  std::lock_guard lock(mutex_);
  std::vector<Entry> found;
  for (const auto& [token, entry] : watched_) found.push_back(entry);
  return found;
}

}  // namespace mooncake_tcp
