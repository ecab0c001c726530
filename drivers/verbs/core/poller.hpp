// What the control thread sleeps on.
#pragma once

#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

#include "library.hpp"
#include "support/os.hpp"

namespace mooncake::verbs {

class Poller {
 public:
  static constexpr uint64_t kWake = 0, kListener = 1, kDevice = 2, kFirstSocket = 16;

  Status open() {
    epoll_.reset(epoll_create1(EPOLL_CLOEXEC));
    wake_.reset(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!epoll_.valid() || !wake_.valid())
      return system_failure(MC_IO, "cannot create the descriptors of the control thread", errno);
    return add(wake_.get(), kWake, EPOLLIN);
  }
  Status add(int fd, uint64_t id, uint32_t events) { return control(EPOLL_CTL_ADD, fd, id, events); }
  Status change(int fd, uint64_t id, uint32_t events) { return control(EPOLL_CTL_MOD, fd, id, events); }
  void remove(int fd) { epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

  // How many of `events`. Any thread may wake() it.
  int wait(epoll_event* events, int capacity, int timeout_ms) {
    return epoll_wait(epoll_.get(), events, capacity, timeout_ms);
  }
  void wake() { [[maybe_unused]] int ignored = eventfd_write(wake_.get(), 1); }
  void drain() {
    eventfd_t ignored;
    [[maybe_unused]] int result = eventfd_read(wake_.get(), &ignored);
  }
  // For sockets; never given twice. Control thread only.
  uint64_t new_id() { return next_++; }

 private:
  Status control(int what, int fd, uint64_t id, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    if (epoll_ctl(epoll_.get(), what, fd, &event) == 0) return {};
    return system_failure(MC_IO, "cannot watch a descriptor", errno);
  }
  driver::UniqueFd epoll_, wake_;
  uint64_t next_ = kFirstSocket;
};

}  // namespace mooncake::verbs
