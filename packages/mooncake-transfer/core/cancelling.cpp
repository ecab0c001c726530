// Ends transfers early, and says what stands in the way of one that does not end.
#include <utility>

#include "engine.hpp"

namespace mooncake {

void Engine::cancel(Transfer& t, const Status& why) {
  if (t.state() != Transfer::State::kRunning) return;
  std::shared_ptr<Transfer> ended, unchecked;
  {
    std::lock_guard lock(mutex_);
    if (!t.active) return;
    t.note_failure(why);  // here: not for a run that has ended, and end() may still forgive it
    t.cancelled = true;
    cancels_.fetch_add(1);
    bool dropped = t.cutting;
    drop_rest(t);
    dropped |= drop_notice(t);
    cancel_slices(t);
    Peer& peer = *t.remote->peer();
    // What waits of it is dropped there.
    if (!peer.queue.retries.empty() || !peer.queue.fenced.empty()) make_ready(peer);
    if (dropped && take_ended(t)) ended = t.shared_from_this();
    if (t.resting && !t.checked && unlink(t)) unchecked = t.shared_from_this();
  }
  if (ended) end(*ended, now_ns());
  if (unchecked) finish(*unchecked, now_ns());
  attended_ = true;
  kick();
}

void Engine::cancel_slices(Transfer& t) {
  for (Slice* slice = t.slices; slice != nullptr; slice = slice->next) {
    if (!slice->with_driver) continue;
    (*endpoints_)[t.remote->peer()->rails()[slice->rail]->endpoint]->cancel(slice->op.cookie);
  }
}

std::string Engine::overdue(Transfer& t, double timeout_s) {
  char limit[32];
  snprintf(limit, sizeof(limit), "%g", timeout_s);
  return t.label() + " did not finish within " + limit + " s: " + explain(t);
}

std::string Engine::explain(Transfer& t) {
  std::string text =
      std::to_string(t.bytes_done()) + " of " + std::to_string(t.plan.bytes()) + " bytes were moved";
  std::lock_guard lock(mutex_);
  uint64_t rails = 0;
  size_t queued = t.cutting;
  for (Slice* slice = t.slices; slice != nullptr; slice = slice->next) {
    if (slice->with_driver) rails |= uint64_t{1} << slice->rail;
    queued += !slice->with_driver && !slice->notice;
  }
  const auto& ways = t.remote->peer()->rails();
  const char* before = ", the rest waits for answers over ";
  for (size_t r = 0; r < ways.size(); ++r) {
    if ((rails >> r & 1u) == 0) continue;
    text += before + ways[r]->label;
    before = ", ";
  }
  if (rails == 0 && queued != 0) {
    text += ", the rest waits for its turn";
    for (size_t r = 0; r < ways.size(); ++r) text += (r == 0 ? " on " : ", ") + ways[r]->label;
  }
  if (t.failed_questions != Transfer::kNotAsked)
    text += "; it waits for a fence: " + t.remote->peer()->late()->explain();
  if (t.active && t.resting) {
    text += t.checked ? "; the two ends are being compared" : "; checksums of the peer are awaited";
    before = ", moved over ";
    for (size_t r = 0; r < ways.size(); ++r) {
      if (t.bytes_on_rail(r) == 0) continue;
      text += before + ways[r]->label;
      before = ", ";
    }
  }
  std::string said = t.attempts();
  if (!said.empty()) text += "; earlier: " + said;
  return text;
}

}  // namespace mooncake
