// Keeps writes away from where bytes of earlier ones, over other connections, may land on them.
#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace mooncake {

std::shared_ptr<LateWrites> Engine::late_writes_of(const std::string& address, uint64_t epoch) {
  std::lock_guard lock(mutex_);
  // Those that nobody uses, with nothing late; and those of a process that was here before.
  std::erase_if(late_, [&](const auto& known) {
    return known->epoch != epoch && known.use_count() == 1 && (!known->any() || known->address == address);
  });
  for (const auto& known : late_) {
    if (known->epoch == epoch) return known;
  }
  return late_.emplace_back(std::make_shared<LateWrites>(address, epoch));
}

std::shared_ptr<LateWrites> Engine::late_writes_of(uint64_t epoch) {
  std::lock_guard lock(mutex_);
  for (const auto& known : late_) {
    if (known->epoch == epoch) return known;
  }
  return nullptr;
}

// Takes from `rails` those that the write must not use now.
Engine::Pick Engine::behind_fence(Transfer& t, uint64_t now, uint64_t* rails) {
  Peer& peer = *t.remote->peer();
  LateWrites& late = *peer.late();
  uint64_t open = late.open_rails(peer, now);
  if ((*rails & ~open) == 0) {
    t.failed_questions = Transfer::kNotAsked;
    return Pick::kRail;
  }
  uint64_t failed = late.failed_questions();
  if (t.failed_questions == Transfer::kNotAsked) t.failed_questions = failed;
  if (t.failed_questions != failed) {
    // The driver of the rail with late bytes keeps the order there; elsewhere nobody does.
    *rails &= open;
    return *rails != 0 ? Pick::kRail : Pick::kNoFence;
  }
  if (late.ask(now)) notices_->push({Notice::Kind::kFence, late.address, {}, {}, {}, nullptr, late.epoch});
  look_again_at(now + kFenceCheckNs);
  return Pick::kFenced;
}

void Engine::give_up_behind_fence(Transfer& t) {
  std::string said = t.attempts();
  t.note_failure(
      Status::error(Code::kUnreachable, t.label() + " was not done: " + t.remote->peer()->late()->explain() +
                                            (said.empty() ? "" : "; earlier: " + said)));
  t.cancelled = true;
  cancels_.fetch_add(1);
  drop_rest(t);
  drop_notice(t);
  cancel_slices(t);
}

// Transfers that a fence held up have their turn again when it is time to look.
void Engine::bring_back_fenced(Peer& peer, Batch& batch) {
  PeerQueue& queue = peer.queue;
  if (queue.fenced.empty()) return;
  bool due = queue.fenced_until_ns <= batch.now_ns;
  std::vector<Waiting> kept;
  for (Waiting& item : queue.fenced) {
    if (!item.transfer->cutting) {
      batch.stale.push_back(std::move(item.transfer));
    } else if (due) {
      auto priority = static_cast<size_t>(item.transfer->options.priority);
      queue.waiting[priority].push_back(std::move(item));
    } else {
      kept.push_back(std::move(item));
    }
  }
  queue.fenced = std::move(kept);
  if (!queue.fenced.empty()) look_again_at(queue.fenced_until_ns);
}

void Engine::hold_behind_fence(std::shared_ptr<Transfer> transfer, uint64_t since_ns) {
  PeerQueue& queue = transfer->remote->peer()->queue;
  queue.fenced_until_ns = now_ns() + kFenceCheckNs;
  queue.fenced.push_back({std::move(transfer), since_ns});
}

Status Engine::fence(const std::string& driver, const std::string& device, const std::string& token,
                     uint64_t deadline_ns) {
  for (auto& endpoint : *endpoints_) {
    if (endpoint->name() == driver && endpoint->device() == device)
      return endpoint->fence(token, deadline_ns);
  }
  return Status::error(Code::kInvalid, "this engine has no driver '" + driver + "' on device '" + device +
                                           "' that could fence off the writes of a peer");
}

}  // namespace mooncake
