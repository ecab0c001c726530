// Runs that are held: every byte has moved, and somebody compares both ends before they are done.
#include <utility>

#include "engine.hpp"

namespace mooncake {

// A held run has no operation left. True when it ends now; otherwise it rests until release() or cancel().
bool Engine::rest(Transfer& t) {
  std::lock_guard lock(mutex_);
  if (!t.active) return false;  // close() has ended it
  // Told of failures too: who expects the run shall not do so for ever.
  notices_->push({Notice::Kind::kHeld, {}, {}, {}, {}, t.shared_from_this(), t.options.held});
  t.resting = t.ok();
  return !t.resting && unlink(t);
}

bool Engine::is_resting(const Transfer& t, uint64_t ticket) {
  // `active` first: nobody else writes the other two while it is true.
  return t.active && t.options.held == ticket && t.resting;
}

bool Engine::begin_check(Transfer& t, uint64_t ticket) {
  std::lock_guard lock(mutex_);
  if (!is_resting(t, ticket) || t.cancelled) return false;
  t.checked = true;
  return true;
}

void Engine::end_check(Transfer& t, uint64_t ticket) {
  std::shared_ptr<Transfer> ended;
  {
    std::lock_guard lock(mutex_);
    if (!is_resting(t, ticket)) return;
    t.checked = false;
    if (t.cancelled && unlink(t)) ended = t.shared_from_this();
  }
  if (ended) finish(*ended, now_ns());
}

bool Engine::wants_check(Transfer& t, uint64_t ticket) {
  std::lock_guard lock(mutex_);
  return is_resting(t, ticket) && !t.cancelled;
}

void Engine::release(Transfer& t, uint64_t ticket, const Status& status) {
  std::shared_ptr<Transfer> ended;
  {
    std::lock_guard lock(mutex_);
    if (!is_resting(t, ticket) || !unlink(t)) return;
    ended = t.shared_from_this();
  }
  if (!status.ok()) t.note_failure(status);
  finish(t, now_ns());
}

}  // namespace mooncake
