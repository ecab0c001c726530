// Threads that wait for an answer or for the next request read their connection's socket themselves: with a
// thread between them and the socket each message would take two wake-ups more.
#include <poll.h>

#include <utility>

#include "channel.hpp"
#include "interrupt.hpp"

namespace mooncake {

namespace {

constexpr size_t kPolledChunk = 16 << 10;

// False when the time is over, or who waits does not want to any more; then it is asked again by who called.
bool sleep_on(int fd, uint64_t until_ns) {
  uint64_t until = slice_until(until_ns);
  pollfd watched{fd, POLLIN, 0};
  if (now_ns() >= until_ns) return false;
  if (::poll(&watched, 1, poll_timeout_ms(until)) != 0) return true;
  return now_ns() < until_ns && (interrupted == nullptr || !interrupted());
}

}  // namespace

void Channel::poll(const LinkPtr& link, uint64_t most_ns, const std::function<bool()>& done,
                   uint64_t sleep_until_ns) {
  uint64_t now = now_ns();
  uint64_t until = now + link->spin.at_most(now, most_ns);
  bool spins = until != now;
  if ((!spins && sleep_until_ns <= now) || !begin_to_poll(link)) return;
  bool goes_on = true;
  while (spins && goes_on) {
    goes_on = read_while_polling(link);
    if (done()) {
      link->spin.hit();
      break;
    }
    uint64_t before = std::exchange(now, now_ns());
    if (now - before > SpinBudget::kLostCoreNs) link->spin.lost_core(now);
    if (now >= until) {
      link->spin.miss();
      break;
    }
    relax();
  }
  while (goes_on && !done()) {
    goes_on = read_while_polling(link);
    if (!goes_on || done() || !sleep_on(link->fd, sleep_until_ns)) break;
  }
  end_polling(link, goes_on);
}

// One thread at a time, and only where nothing but reading is to be done.
bool Channel::begin_to_poll(const LinkPtr& link) {
  std::lock_guard lock(link->mutex);
  bool greeted = link->outgoing || link->greeted;
  bool quiet = !link->shaking_hands && !link->wants_write && link->waiting_bytes() == 0;
  if (!greeted || !quiet || link->closed || link->paused || link->polled) return false;
  link->polled = true;
  link->watch(epoll_fd_);
  return true;
}

void Channel::end_polling(const LinkPtr& link, bool goes_on) {
  std::lock_guard lock(link->mutex);
  link->polled = false;
  link->watch(epoll_fd_);
  if (!goes_on && !link->paused) resume(*link);
}

// False when the loop has to go on, with what was not handled here or to find out why the connection ended.
bool Channel::read_while_polling(const LinkPtr& link) {
  char chunk[kPolledChunk];
  size_t bytes = 0;
  Status why;
  std::lock_guard reading(link->reading);
  {
    std::lock_guard lock(link->mutex);
    if (link->closed || link->paused) return false;
    Link::Io io = link->receive(chunk, sizeof(chunk), &bytes, &why);
    if (io == Link::Io::kNothing) return !link->wants_write;
    if (io == Link::Io::kEnded) return false;
  }
  link->received.append(chunk, bytes);
  return take_frames(link, true);
}

// Frames that may end a connection, or greet, are the loop's.
bool Channel::pollable(const Link& link, const FrameHeader& header) {
  if (header.version != kFrameVersion || header.body_length > kMaxBody) return false;
  if (link.outgoing)
    return header.type == kTypeReply || header.type == kTypeError || header.type == kTypeHelloAck;
  return header.type == kTypeRequest || header.type == kTypeNotify;
}

}  // namespace mooncake
