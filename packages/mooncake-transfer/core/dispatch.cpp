// From queues to drivers and back: cutting, choosing rails, completions, failures.
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace mooncake {

namespace {

constexpr size_t kTurnSlices = 16;         // of one transfer before the next one's turn ...
constexpr uint64_t kTurnBytes = 4u << 20;  // ... or so many bytes
constexpr uint64_t kRetryDelayNs = 20'000'000;
constexpr uint64_t kStallNs = 1'000'000;
constexpr size_t kVeryLongList = 10'000;  // blocks, which take milliseconds

bool may_go_elsewhere(Code code) {
  return code == Code::kUnreachable || code == Code::kUnsupported || code == Code::kIo ||
         code == Code::kNoMemory || code == Code::kClosed;
}

// Of a completion that is not a plain success.
Status outcome(const mc_completion& completion, uint64_t length) {
  if (completion.status == MC_OK) {
    return Status::error(Code::kIo, "the driver says that it is done, yet that " +
                                        std::to_string(completion.bytes) + " of " + std::to_string(length) +
                                        " bytes were moved");
  }
  std::string reason = readable(completion.reason, MC_REASON_MAX);
  return Status::error(code_of(completion.status), reason.empty() ? "no reason given" : reason);
}

// The rest of a long list takes a while. Whoever the first bytes have woken on this core shall not wait so
// long: another thread of ours, or the peer on the same host. A thread that only yields may be chosen again
// at once and then keep the core for a whole slice of it (2.8 ms); one that sleeps is not, for 50 us or so
// that a very long list does not notice.
void let_others_run(size_t blocks) {
  if (blocks < kVeryLongList) {
    sched_yield();
    return;
  }
  timespec nap{0, 1};
  nanosleep(&nap, nullptr);
}

}  // namespace

// ---- posting

Status Engine::begin(Transfer& t, const PostOptions& options) {
  uint64_t allowed = 0;
  Status chosen = choose(t, options, &allowed);
  if (!chosen.ok()) return chosen;
  if (!t.begin(options)) {
    return Status::error(Code::kInvalid, t.label() + " is running already; wait for it, or prepare another");
  }
  t.allowed = allowed;
  if (t.local->enter()) return {};
  t.unbegin();
  return Status::error(Code::kRegionClosed, "local region '" + t.local->name + "' is closed");
}

void Engine::link(const std::shared_ptr<Transfer>& transfer) {
  Transfer& t = *transfer;
  t.self = transfer;
  t.active = true;
  t.previous_active = nullptr;
  t.next_active = active_;
  if (active_ != nullptr) active_->previous_active = &t;
  active_ = &t;
  if (t.options.deadline_ns != 0) deadlines_.emplace(t.options.deadline_ns, &t);
  t.cutting = true;
  t.live = 1;
  reserve_notice(t);
}

Status Engine::post(const std::shared_ptr<Transfer>& transfer, const PostOptions& options) {
  Transfer& t = *transfer;
  if (options.message) ask_for_notices(*t.remote->peer());
  Status begun = begin(t, options);
  if (!begun.ok()) return begun;
  Batch batch;
  batch.cancels = cancels_;
  std::vector<std::shared_ptr<Transfer>> ended;
  bool whole;  // all of it is with drivers
  {
    std::lock_guard lock(mutex_);
    if (closing_) {
      t.local->leave();
      t.unbegin();
      return Status::error(Code::kClosed, "the engine is closed");
    }
    link(transfer);
    Peer& peer = *t.remote->peer();
    if (t.cursor.exhausted(t.plan)) {
      drop_rest(t);
      drop_notice(t);
      if (take_ended(t)) ended.push_back(transfer);
    } else {
      Cut cut = peer.queue.empty() ? cut_into(t, batch) : Cut::kTurnOver;
      if (t.cutting) {
        if (cut == Cut::kFenced) {
          hold_behind_fence(transfer, now_ns());
        } else {
          enqueue(transfer);
        }
        if (cut == Cut::kFull) block(peer);
      } else if (take_ended(t)) {
        ended.push_back(transfer);
      }
      if (!peer.queue.retries.empty()) make_ready(peer);
    }
    whole = !t.cutting;
  }
  for (const auto& done : ended) end(*done, now_ns());
  if (batch.count != 0) submit(batch);
  if (!whole && batch.count == kBatch) let_others_run(t.plan.size());
  progress();
  if (t.state() != Transfer::State::kRunning) return {};
  // Small things are left to whoever waits for them; the rest must not depend on anybody's waiting.
  bool unattended = whole && t.plan.bytes() <= kSpinBytes && !options.message && options.held == 0 &&
                    options.deadline_ns == 0;
  if (options.deadline_ns != 0) kick();
  if (!unattended) {
    attend();
  } else if (asleep_) {
    kick();
  }
  return {};
}

void Engine::enqueue(std::shared_ptr<Transfer> transfer) {
  Peer& peer = *transfer->remote->peer();
  auto& queue = peer.queue.waiting[static_cast<size_t>(transfer->options.priority)];
  queue.push_back({std::move(transfer), now_ns()});
  make_ready(peer);
}

// The key of a peer is that of its most urgent transfer: when it began to wait, and one aging period per
// class below the highest. So lower classes are served last, yet never wait for ever.
void Engine::make_ready(Peer& peer) {
  PeerQueue& queue = peer.queue;
  if (queue.ready) unready(peer);
  uint64_t key = queue.retries.empty() ? ~uint64_t{0} : 0;
  bool any = !queue.retries.empty() || !queue.fenced.empty();
  for (size_t priority = 0; priority < kPriorities; ++priority) {
    if (queue.waiting[priority].empty()) continue;
    any = true;
    key = std::min(key, queue.waiting[priority].front().since_ns + priority * policy_.aging_ns);
  }
  if (!any) return;
  queue.key = key;
  queue.blocked = false;
  queue.ready = true;
  ready_.emplace(key, &peer);
  queued_ = ready_.size();
}

void Engine::unready(Peer& peer) {
  if (!peer.queue.ready) return;
  ready_.erase({peer.queue.key, &peer});
  peer.queue.ready = false;
  queued_ = ready_.size();
}

// Until a completion makes room, or the pause of another rail ends.
void Engine::block(Peer& peer) {
  unready(peer);
  peer.queue.blocked = true;
  uint64_t now = now_ns();
  for (const auto& rail : peer.rails()) {
    if (rail->paused_until_ns() > now) look_again_at(rail->paused_until_ns());
  }
}

void Engine::look_again_at(uint64_t ns) {
  if (ns >= next_retry_ns_) return;
  next_retry_ns_ = ns;
  kick();
}

void Engine::pump() {
  while (queued_ != 0) {
    Batch batch;
    batch.cancels = cancels_;
    std::vector<std::shared_ptr<Transfer>> ended;
    {
      std::lock_guard lock(mutex_);
      collect(batch, ended);
    }
    for (const auto& transfer : ended) end(*transfer, now_ns());
    if (batch.count == 0 && ended.empty()) return;
    if (batch.count != 0) submit(batch);
  }
}

void Engine::collect(Batch& batch, std::vector<std::shared_ptr<Transfer>>& ended) {
  while (!ready_.empty() && batch.count < kBatch) {
    Peer& peer = *ready_.begin()->second;
    unready(peer);
    PeerQueue& queue = peer.queue;
    bring_back_fenced(peer, batch);
    Cut cut = retry_into(peer, batch, ended);
    if (cut == Cut::kExhausted) {
      // Only retries that are not due yet are left, or nothing.
      std::deque<Waiting>* best = nullptr;
      uint64_t best_key = ~uint64_t{0};
      for (size_t priority = 0; priority < kPriorities; ++priority) {
        auto& waiting = queue.waiting[priority];
        while (!waiting.empty() && !waiting.front().transfer->cutting) {
          batch.stale.push_back(std::move(waiting.front().transfer));
          waiting.pop_front();
        }
        if (waiting.empty()) continue;
        uint64_t key = waiting.front().since_ns + priority * policy_.aging_ns;
        if (best == nullptr || key < best_key) {
          best = &waiting;
          best_key = key;
        }
      }
      if (best == nullptr) continue;
      std::shared_ptr<Transfer> transfer = best->front().transfer;
      cut = cut_into(*transfer, batch);
      if (!transfer->cutting) {
        best->pop_front();
        if (take_ended(*transfer)) ended.push_back(transfer);
        batch.stale.push_back(std::move(transfer));
      } else if (cut == Cut::kTurnOver) {
        best->pop_front();
        best->push_back({std::move(transfer), now_ns()});
      } else if (cut == Cut::kFenced) {
        uint64_t since_ns = best->front().since_ns;
        best->pop_front();
        hold_behind_fence(std::move(transfer), since_ns);
      }
    }
    if (cut == Cut::kFull) {
      block(peer);
    } else {
      uint64_t now = queue.retries.empty() ? 0 : now_ns();
      bool due = false;
      for (const auto& waiting : queue.waiting) due |= !waiting.empty();
      for (const Slice* slice : queue.retries) due |= slice->not_before_ns <= now;
      if (due || cut == Cut::kOtherEndpoint) make_ready(peer);
    }
    if (cut == Cut::kOtherEndpoint) return;
  }
}

Engine::Cut Engine::cut_into(Transfer& t, Batch& batch) {
  Peer& peer = *t.remote->peer();
  while (!t.cursor.exhausted(t.plan)) {
    if (t.cancelled) {
      drop_rest(t);
      return Cut::kFailed;
    }
    if (batch.count == kBatch) return Cut::kOtherEndpoint;
    bool alone = t.remote->peer()->queue.empty();
    if (!alone && (t.turn_slices >= kTurnSlices || t.turn_bytes >= kTurnBytes)) {
      t.turn_slices = 0;
      t.turn_bytes = 0;
      return Cut::kTurnOver;
    }
    size_t rail = 0;
    bool probe = false;
    Pick found = pick(t, 0, 1, batch.now_ns, &rail, &probe);
    if (found == Pick::kFull) return Cut::kFull;
    if (found == Pick::kFenced) return Cut::kFenced;
    if (found == Pick::kNoFence) {
      give_up_behind_fence(t);
      return Cut::kFailed;
    }
    if (found == Pick::kNone) {
      give_up_without_route(t);
      return Cut::kFailed;
    }
    const Rail& way = *peer.rails()[rail];
    if (batch.count != 0 && (batch.endpoint != way.endpoint || batch.stream != t.options.stream))
      return Cut::kOtherEndpoint;
    uint64_t hard = 0;
    uint64_t limit = slice_limit(t, way, probe, &hard);
    Block block = t.cursor.cut(t.plan, limit, hard);
    ++t.turn_slices;
    t.turn_bytes += block.length;
    Slice& slice = *new_slice(t);
    slice.op.opcode = t.opcode;
    slice.op.local_offset = block.local_offset;
    slice.op.remote_offset = block.remote_offset;
    slice.op.length = block.length;
    if (t.options.message) ++t.options.message->owed;
    place(slice, rail, batch);
  }
  drop_rest(t);
  return Cut::kExhausted;
}

Engine::Cut Engine::retry_into(Peer& peer, Batch& batch, std::vector<std::shared_ptr<Transfer>>& ended) {
  auto& retries = peer.queue.retries;
  uint64_t now = batch.now_ns;
  for (size_t left = retries.size(); left > 0; --left) {
    if (batch.count == kBatch) return Cut::kOtherEndpoint;
    Slice& slice = *retries.front();
    Transfer& t = *slice.transfer;
    retries.pop_front();
    size_t rail = 0;
    bool probe = false;
    Pick found = Pick::kNone;
    if (!t.cancelled && !closing_) {
      if (slice.not_before_ns > now) {
        retries.push_back(&slice);
        look_again_at(slice.not_before_ns);
        continue;
      }
      found = pick(t, slice.tried, slice.op.length, now, &rail, &probe);
      if (found == Pick::kFull) {
        retries.push_front(&slice);
        return Cut::kFull;
      }
      if (found == Pick::kFenced) {
        slice.not_before_ns = now + kFenceCheckNs;
        look_again_at(slice.not_before_ns);
        retries.push_back(&slice);
        continue;
      }
      if (found == Pick::kNoFence) {
        give_up_behind_fence(t);
        found = Pick::kNone;
      }
    }
    if (found == Pick::kNone) {
      // A rail that could not even be connected ends a round as a failed one does.
      bool running = !t.cancelled && !closing_;
      if (running && slice.tried != 0 && reroute(slice, Code::kUnreachable)) continue;
      if (!t.cancelled) {
        give_up_without_route(t);
      }
      free_slice(slice);
      --t.live;
      if (take_ended(t)) ended.push_back(t.shared_from_this());
      continue;
    }
    const Rail& way = *peer.rails()[rail];
    if (batch.count != 0 && (batch.endpoint != way.endpoint || batch.stream != t.options.stream)) {
      retries.push_front(&slice);
      return Cut::kOtherEndpoint;
    }
    place(slice, rail, batch);
  }
  return Cut::kExhausted;
}

// ---- slices

Slice* Engine::new_slice(Transfer& t) {
  Slice* slice = &slices_.take();
  slice->transfer = &t;
  slice->previous = nullptr;
  slice->next = t.slices;
  if (t.slices != nullptr) t.slices->previous = slice;
  t.slices = slice;
  ++t.live;
  return slice;
}

void Engine::free_slice(Slice& slice) {
  Transfer& t = *slice.transfer;
  (slice.previous != nullptr ? slice.previous->next : t.slices) = slice.next;
  if (slice.next != nullptr) slice.next->previous = slice.previous;
  if (slice.notice) t.options.message->transfer = nullptr;
  slices_.give_back(slice);
}

bool Engine::place(Slice& slice, size_t rail, Batch& batch) {
  Transfer& t = *slice.transfer;
  Peer& peer = *t.remote->peer();
  Rail& way = *peer.rails()[rail];
  slice.rail = static_cast<uint32_t>(rail);
  slice.tried |= rail_bit(rail);
  slice.submitted_ns = batch.now_ns;
  Status status = t.remote->handle(rail, &slice.op.connection, &slice.op.remote);
  if (!status.ok()) {
    t.note_attempt(status.reason);
    way.failed(slice.submitted_ns, status.reason, policy_);
    tell_unused(*t.remote, rail, status);
    if (status.code == Code::kUnsupported) t.remote->rule_out(rail);
    peer.queue.retries.push_back(&slice);
    drop_notice(t);
    return false;
  }
  if (t.options.message) follow(slice, batch);
  slice.op.local = t.local->handles[way.endpoint];
  slice.queued = way.begin(slice.op.length);
  ++peer.queue.placed;
  slice.with_driver = true;
  slices_.issue(slice, way.endpoint);
  batch.endpoint = way.endpoint;
  batch.stream = t.options.stream;
  batch.ops[batch.count] = slice.op;
  batch.slices[batch.count++] = &slice;
  return true;
}

void Engine::submit(Batch& batch) {
  Endpoint& endpoint = *(*endpoints_)[batch.endpoint];
  size_t begin = 0;
  while (begin < batch.count) {
    size_t accepted = 0;
    Status status = endpoint.submit(batch.ops + begin, batch.count - begin, &accepted, batch.stream);
    begin += accepted;
    note_accepted(batch, begin - accepted, begin);
    if (begin == batch.count) break;
    if (!status.ok()) {
      // The driver refuses this operation, not those behind it.
      Slice& slice = *batch.slices[begin++];
      SliceTable::withdraw(slice);
      Peer& peer = *slice.transfer->remote->peer();
      peer.rails()[slice.rail]->end(slice.op.length);
      Slice* ended = &slice;
      if (!on_failure(slice, std::move(status))) settle(&ended, 1, now_ns());
      continue;
    }
    // Its queue is full. The rest comes first when it has room again.
    std::lock_guard lock(mutex_);
    for (size_t i = batch.count; i > begin; --i) {
      Slice& slice = *batch.slices[i - 1];
      Peer& peer = *slice.transfer->remote->peer();
      peer.rails()[slice.rail]->end(slice.op.length);
      slice.with_driver = false;
      SliceTable::withdraw(slice);
      slice.tried &= ~rail_bit(slice.rail);
      peer.queue.retries.push_front(&slice);
      unready(peer);
      auto same = [&](const auto& known) { return known.get() == &peer; };
      if (std::none_of(stalled_.begin(), stalled_.end(), same)) stalled_.push_back(peer.shared_from_this());
    }
    kick();
    // Completions bring them back; the clock does when the driver had another reason than its own operations.
    next_retry_ns_ = std::min(next_retry_ns_.load(), now_ns() + kStallNs);
    break;
  }
  send_notices(batch);
  if (batch.cancels == cancels_) return;
  // A cancel() meanwhile may have asked the driver before it had the operations.
  std::lock_guard lock(mutex_);
  for (Transfer* t = active_; t != nullptr; t = t->next_active) {
    if (t->cancelled) cancel_slices(*t);
  }
}

// ---- completions

void Engine::on_completions(size_t endpoint, const mc_completion* completions, size_t count) {
  uint64_t now = now_ns();
  Slice* ended[kBatch];
  size_t n = 0;
  for (size_t i = 0; i < count; ++i) {
    const mc_completion& completion = completions[i];
    Slice* named = slices_.redeem(completion.cookie, endpoint);
    if (named == nullptr) {
      accuse(endpoint, "completed an operation that it does not have (cookie " +
                           std::to_string(completion.cookie) + ")");
      continue;
    }
    Slice& slice = *named;
    Transfer& t = *slice.transfer;
    if (slice.notice) {
      notice_ended(slice, completion);
      ended[n++] = &slice;
      if (n == kBatch) {
        settle(ended, n, now);
        n = 0;
      }
      continue;
    }
    Rail& way = *t.remote->peer()->rails()[slice.rail];
    way.end(slice.op.length);
    if (completion.status == MC_OK && completion.bytes == slice.op.length) {
      t.moved(slice.rail, slice.op.length);
      uint64_t elapsed = now > slice.submitted_ns ? now - slice.submitted_ns : 0;
      if (way.succeeded(slice.op.length, slice.queued, elapsed))
        notices_->push({Notice::Kind::kRailRecovered, t.remote->peer()->label(), way.label, {}, {}, nullptr});
      ended[n++] = &slice;
    } else if (!on_failure(slice, outcome(completion, slice.op.length))) {
      ended[n++] = &slice;
    }
    if (n == kBatch) {
      settle(ended, n, now);
      n = 0;
    }
  }
  settle(ended, n, now);
}

void Engine::accuse(size_t endpoint, const std::string& of) {
  Endpoint& driver = *(*endpoints_)[endpoint];
  if (driver.faults.fetch_add(1) == 0)
    notices_->push({Notice::Kind::kDriverFault, {}, driver.label(), {}, of, nullptr});
}

void Engine::settle(Slice* const* slices, size_t count, uint64_t now) {
  Transfer* ended[kBatch];
  std::vector<std::shared_ptr<Peer>> woken;  // let go of after the lock
  size_t n = 0;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < count; ++i) {
      Transfer& t = *slices[i]->transfer;
      free_slice(*slices[i]);
      Peer& peer = *t.remote->peer();
      if (peer.queue.blocked) make_ready(peer);
      --t.live;
      if (take_ended(t)) ended[n++] = &t;
    }
    woken.swap(stalled_);
    for (const auto& peer : woken) make_ready(*peer);
  }
  for (size_t i = 0; i < n; ++i) end(*ended[i], now);
}

bool Engine::on_failure(Slice& slice, Status status) {
  Transfer& t = *slice.transfer;
  break_notice(t);
  Peer& peer = *t.remote->peer();
  Rail& way = *peer.rails()[slice.rail];
  if (t.opcode == MC_WRITE) peer.late()->note(peer, slice.rail, status.code != Code::kCancelled);
  status.reason = (*endpoints_)[way.endpoint]->without_label(std::move(status.reason));
  std::string reason = way.label + ": " + status.reason;
  if (!may_go_elsewhere(status.code) || t.cancelled || closing_) {
    status.reason = t.label() + " failed over " + reason;
  } else {
    t.note_attempt(reason);
    bool opened = false;
    if (status.code == Code::kUnsupported) {
      t.remote->rule_out(slice.rail);
    } else {
      opened = way.failed(slice.submitted_ns, status.reason, policy_);
    }
    if (way.tell(status.reason) || opened) {
      notices_->push({opened ? Notice::Kind::kBreakerOpened : Notice::Kind::kRailFailed, peer.label(),
                      way.label, t.remote->name(), status.reason, nullptr});
    }
    std::lock_guard lock(mutex_);
    slice.with_driver = false;
    if (reroute(slice, status.code)) {
      way.retried();
      return true;
    }
    Code code = status.code == Code::kUnsupported ? Code::kNoRoute : status.code;
    status = Status::error(code, t.label() + " failed: " + t.attempts());
  }
  t.note_failure(status);
  // The rest would be work for nothing. Whoever says so first cancels it: each of thousands of slices that
  // then end as cancelled would otherwise cancel all others again.
  bool first = !t.cancelled.exchange(true);
  if (first) cancels_.fetch_add(1);
  std::lock_guard lock(mutex_);
  slice.with_driver = false;
  drop_rest(t);
  if (first) cancel_slices(t);
  if (!peer.queue.retries.empty()) make_ready(peer);  // its retries are dropped there
  return false;
}

bool Engine::reroute(Slice& slice, Code code) {
  Transfer& t = *slice.transfer;
  Peer& peer = *t.remote->peer();
  uint64_t usable = usable_rails(t, t.allowed);
  if ((usable & ~slice.tried) == 0) {
    uint32_t attempts = t.options.attempts == 0 ? policy_.attempts : t.options.attempts;
    // A connection that was lost may stand again in a moment; a driver that cannot do it never can.
    if (code == Code::kUnsupported || slice.attempts + 1 >= attempts) return false;
    if (usable == 0) return false;
    slice.tried = 0;
    slice.not_before_ns = now_ns() + (kRetryDelayNs << std::min(slice.attempts++, 10u));
    look_again_at(slice.not_before_ns);
  }
  peer.queue.retries.push_back(&slice);
  make_ready(peer);
  return true;
}

void Engine::drop_rest(Transfer& t) {
  if (!t.cutting) return;
  t.cutting = false;
  --t.live;
}

// Whoever took its last slice or its rest away asks; held ones stay active until release().
bool Engine::take_ended(Transfer& t) {
  if (t.live != 0) return false;
  return t.options.held != 0 ? t.active : unlink(t);
}

bool Engine::unlink(Transfer& t) {
  if (!t.active) return false;
  t.active = false;
  (t.previous_active != nullptr ? t.previous_active->next_active : active_) = t.next_active;
  if (t.next_active != nullptr) t.next_active->previous_active = t.previous_active;
  if (t.options.deadline_ns != 0) deadlines_.erase({t.options.deadline_ns, &t});
  return true;
}

// Every slice has ended. The transfer is no longer active, unless it is held.
void Engine::end(Transfer& t, uint64_t now) {
  if (t.options.held != 0) {
    if (rest(t)) finish(t, now);
    return;
  }
  if (t.bytes_done() == t.plan.bytes()) t.forgive();
  finish(t, now);
}

void Engine::finish(Transfer& t, uint64_t now) {
  t.finishing = true;
  t.local->leave();
  if (Status told = tell(t); !told.ok()) t.note_failure(told);
  std::shared_ptr<Transfer> keep = std::move(t.self);
  t.complete(now);
}

}  // namespace mooncake
