// Who polls and who sleeps.
//
// A thread that waits for a transfer polls for a moment, then leads: it sleeps on the drivers' descriptors
// itself, so that one wake-up is enough. The progress thread does that only while nobody leads and something
// is in flight, and keeps the clock: deadlines and retries.
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>

#include "engine.hpp"

namespace mooncake {

namespace {

constexpr uint64_t kNapNs = 1'000'000;  // while only small things are in flight that someone may wait for
constexpr uint64_t kLedCheckNs = 10'000'000;  // while another thread leads
constexpr uint64_t kIdleNs = 1'000'000'000;
constexpr uint64_t kRestlessNs = 10'000'000;  // naps go on so long after the last completion
constexpr uint64_t kTimedPollNs = 200'000;    // a driver without a descriptor

timespec duration(uint64_t until_ns) {
  uint64_t now = now_ns();
  uint64_t left = until_ns > now ? until_ns - now : 0;
  return {static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
}

}  // namespace

size_t Engine::poll(bool wait_for_turn) {
  size_t total = 0;
  for (size_t e = 0; e < endpoints_->size(); ++e) {
    Endpoint& endpoint = *(*endpoints_)[e];
    if (endpoint.outstanding == 0) continue;
    total += endpoint.poll(wait_for_turn, [this, e](const mc_completion* completions, size_t count) {
      on_completions(e, completions, count);
    });
  }
  if (listening()) total += fetch_notices(false);
  return total;
}

void Engine::progress() {
  // Once: whoever posts or looks does not carry on the work of others.
  if (queued_ != 0) pump();
  if (poll(false) != 0 && queued_ != 0) pump();
}

// Idle ones too: their descriptors would stay readable from before, and what is posted to them meanwhile must
// wake whoever sleeps.
bool Engine::arm_all() {
  bool armed = true;
  for (auto& endpoint : *endpoints_) armed &= endpoint->arm();
  if (!armed) make_room_for_notices();
  return armed;
}

bool Engine::outstanding() const {
  return std::any_of(endpoints_->begin(), endpoints_->end(),
                     [](const auto& endpoint) { return endpoint->outstanding != 0; });
}

void Engine::kick() { [[maybe_unused]] int ignored = eventfd_write(wake_fd_, 1); }

void Engine::attend() {
  if (!attended_.exchange(true) || asleep_) kick();
}

// ---- waiting

bool Engine::wait(Transfer& t, uint64_t deadline_ns) {
  constexpr auto kRunning = Transfer::State::kRunning;
  if (t.state() != kRunning) return true;
  uint64_t now = now_ns();
  uint64_t spin = t.plan.bytes() <= kSpinBytes ? spin_.ns(now, t.plan.bytes()) : 0;
  for (uint64_t until = std::min(now + spin, deadline_ns);;) {
    progress();
    if (t.state() != kRunning) {
      if (spin != 0) spin_.hit();
      return true;
    }
    uint64_t before = now;
    now = now_ns();
    if (now - before > SpinBudget::kLostCoreNs) spin_.lost_core(now);
    if (now >= until) break;
    relax();
  }
  if (spin != 0) spin_.miss();
  bool nobody = false;
  if (led_.compare_exchange_strong(nobody, true)) {
    lead(t, deadline_ns);
    led_ = false;
    // What others wait for must not depend on this thread.
    if (outstanding() || queued_ != 0 || listening()) {
      attended_ = true;
      kick();
    }
    return t.state() != kRunning;
  }
  return t.wait_until(deadline_ns);
}

void Engine::lead(Transfer& t, uint64_t deadline_ns) {
  eventfd_t drained;
  eventfd_read(leader_fd_, &drained);
  if (!t.wake(leader_fd_)) return;
  while (t.state() == Transfer::State::kRunning && !closing_ && now_ns() < deadline_ns) {
    if (queued_ != 0) pump();
    if (poll(true) != 0 || !arm_all()) continue;
    if (queued_ != 0 || t.state() != Transfer::State::kRunning) continue;
    uint64_t until = deadline_ns;
    for (auto& endpoint : *endpoints_) {
      if (endpoint->outstanding != 0 && endpoint->event_fd() < 0)
        until = std::min(until, now_ns() + kTimedPollNs);
    }
    sleep_until(leader_epoll_fd_, until);
  }
  t.unwake(leader_fd_);
}

void Engine::sleep_until(int epoll_fd, uint64_t until_ns) {
  pollfd watched{epoll_fd, POLLIN, 0};
  timespec left = duration(until_ns);
  ppoll(&watched, 1, &left, nullptr);
}

// ---- the progress thread

void Engine::run() {
  uint64_t last_completion = 0;
  while (!closing_) {
    eventfd_t drained;
    eventfd_read(wake_fd_, &drained);
    uint64_t timer = run_timers();
    if (queued_ != 0) pump();
    if (led_) {
      // Who leads sleeps on descriptors, and knows nothing of operations that came to a driver without one.
      bool unseen = std::any_of(endpoints_->begin(), endpoints_->end(), [](auto& endpoint) {
        return endpoint->outstanding != 0 && endpoint->event_fd() < 0;
      });
      if (unseen) poll(false);
      sleep_until(wake_fd_, std::min(timer, now_ns() + (unseen ? kTimedPollNs : kLedCheckNs)));
      continue;
    }
    uint64_t now = now_ns();
    if (poll(true) != 0) {
      last_completion = now;
      continue;
    }
    // Where peers send notices, the drivers are listened to all the time.
    bool idle = !outstanding();
    if (idle) attended_ = false;
    if (idle && !listening()) {
      if (now - last_completion < kRestlessNs) {
        sleep_until(wake_fd_, std::min(timer, now + kNapNs));
        continue;
      }
      asleep_ = true;
      // post() looks at `asleep_` after its operations are counted as outstanding: one sees the other.
      if (!outstanding() && queued_ == 0 && !attended_ && !closing_ && !listening())
        sleep_until(wake_fd_, std::min(timer, now + kIdleNs));
      asleep_ = false;
      continue;
    }
    if (!idle && !attended_) {
      sleep_until(wake_fd_, std::min(timer, now + kNapNs));
      // Nobody took it in the meantime, so nobody waits in wait().
      if (outstanding()) attended_ = true;
      continue;
    }
    if (!arm_all()) continue;
    for (auto& endpoint : *endpoints_) {
      bool busy = endpoint->outstanding != 0 || (endpoint->has_notices() && listening());
      if (busy && endpoint->event_fd() < 0) timer = std::min(timer, now + kTimedPollNs);
    }
    if (queued_ == 0) sleep_until(epoll_fd_, std::min(timer, now + kIdleNs));
  }
}

// Ends transfers whose deadline has passed and brings back slices whose time has come; returns when next.
uint64_t Engine::run_timers() {
  uint64_t now = now_ns();
  std::vector<std::shared_ptr<Transfer>> late;
  uint64_t next = ~uint64_t{0};
  {
    std::lock_guard lock(mutex_);
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      late.push_back(deadlines_.begin()->second->self);
      deadlines_.erase(deadlines_.begin());
    }
    if (!deadlines_.empty()) next = deadlines_.begin()->first;
    if (next_retry_ns_ <= now) {
      next_retry_ns_ = ~uint64_t{0};
      for (Transfer* t = active_; t != nullptr; t = t->next_active) {
        Peer& peer = *t->remote->peer();
        if (!peer.queue.empty() && !peer.queue.ready) make_ready(peer);
      }
    }
    next = std::min(next, next_retry_ns_.load());
  }
  for (const auto& transfer : late) {
    cancel(*transfer, Status::error(Code::kTimeout, transfer->label() + " did not finish by its deadline: " +
                                                        explain(*transfer)));
  }
  return next;
}

}  // namespace mooncake
