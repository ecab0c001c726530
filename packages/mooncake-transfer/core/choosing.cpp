// Which rail a slice takes: those that the transfer may use, by tier, by the time they would need.
#include <algorithm>
#include <utility>

#include "engine.hpp"

namespace mooncake {

namespace {

constexpr uint64_t kProbeBytes = 64u << 10;  // a slow rail shall not hold up a transfer by much

size_t lowest(uint64_t rails) { return static_cast<size_t>(__builtin_ctzll(rails)); }

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

}  // namespace

// ---- what a run may use

uint64_t Engine::rails_where(const Transfer& t, const std::function<bool(const Endpoint&)>& suits) const {
  uint64_t found = 0;
  const auto& rails = t.remote->peer()->rails();
  for (uint64_t m = t.rails; m != 0; m &= m - 1) {
    if (suits(*(*endpoints_)[rails[lowest(m)]->endpoint])) found |= m & -m;
  }
  return found;
}

Status Engine::choose(const Transfer& t, const PostOptions& options, uint64_t* allowed) const {
  *allowed = t.rails;
  if (options.stream != nullptr) {
    *allowed &= rails_where(t, [](const Endpoint& endpoint) { return endpoint.follows_streams(); });
    if (*allowed == 0) {
      return Status::error(Code::kNoRoute,
                           t.label() +
                               ": no driver of these regions follows device streams; post it without, or "
                               "use memory of a device whose driver does");
    }
  }
  if (!options.drivers.empty()) {
    *allowed &= rails_where(t, [&](const Endpoint& endpoint) {
      return std::find(options.drivers.begin(), options.drivers.end(), endpoint.name()) !=
             options.drivers.end();
    });
    if (*allowed == 0) {
      return Status::error(Code::kNoRoute,
                           t.label() + " was posted with drivers " + join(options.drivers) +
                               ", of which none leads there; those that do: " + join(drivers_of(t, t.rails)));
    }
  }
  if (disabled_ != 0 && (*allowed & usable_rails(t, *allowed)) == 0) {
    return Status::error(Code::kNoRoute, t.label() + ": every driver that leads there is disabled (" +
                                             join(drivers_of(t, *allowed)) +
                                             "); TransferEngine.enable_driver() allows one again");
  }
  return {};
}

std::vector<std::string> Engine::drivers_of(const Transfer& t, uint64_t rails) const {
  std::vector<std::string> names;
  for (uint64_t m = rails; m != 0; m &= m - 1) {
    const std::string& name = (*endpoints_)[t.remote->peer()->rails()[lowest(m)]->endpoint]->name();
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  }
  return names;
}

uint64_t Engine::usable_rails(const Transfer& t, uint64_t allowed) const {
  uint64_t usable = allowed & t.remote->rails();
  if (disabled_ != 0) [[unlikely]]
    usable &= rails_where(t, [](const Endpoint& endpoint) { return endpoint.enabled.load(); });
  return usable;
}

void Engine::give_up_without_route(Transfer& t) {
  std::string said = t.attempts();
  uint64_t disabled = t.allowed & t.remote->rails() & ~usable_rails(t, t.allowed);
  if (disabled != 0) said += (said.empty() ? "" : "; ") + join(drivers_of(t, disabled)) + " is disabled";
  t.note_failure(
      Status::error(Code::kNoRoute, "no driver does the " + t.label() + (said.empty() ? "" : ": " + said)));
  t.cancelled = true;
  cancels_.fetch_add(1);
  drop_rest(t);
  drop_notice(t);
  cancel_slices(t);
}

Status Engine::enable_driver(const std::string& name, bool enabled) {
  std::lock_guard lock(mutex_);
  bool known = false;
  for (auto& endpoint : *endpoints_) {
    if (endpoint->name() != name) continue;
    known = true;
    if (endpoint->enabled.exchange(enabled) != enabled) disabled_ += enabled ? -1 : 1;
  }
  if (known) return {};
  std::vector<std::string> open;
  for (auto& endpoint : *endpoints_) {
    if (std::find(open.begin(), open.end(), endpoint->name()) == open.end()) open.push_back(endpoint->name());
  }
  return Status::error(Code::kInvalid,
                       "driver '" + name + "' is not open in this engine (open: " + join(open) +
                           "); TransferConfig.drivers says which ones an engine opens when it starts");
}

// ---- the one for a slice

Engine::Pick Engine::pick(Transfer& t, uint64_t tried, uint64_t bytes, uint64_t now, size_t* rail,
                          bool* probe) {
  const auto& rails = t.remote->peer()->rails();
  uint64_t usable = usable_rails(t, t.allowed) & ~tried;
  if (usable == 0) return Pick::kNone;
  if (t.opcode == MC_WRITE && t.remote->peer()->late()->any()) [[unlikely]] {
    if (Pick found = behind_fence(t, now, &usable); found != Pick::kRail) return found;
  }
  if ((usable & (usable - 1)) == 0) {
    *rail = lowest(usable);
    return rails[*rail]->room(bytes) ? Pick::kRail : Pick::kFull;
  }
  uint64_t resting = 0;
  size_t first_up = 0;
  uint64_t earliest = ~uint64_t{0};
  for (uint64_t left = usable; left != 0;) {
    // One tier after another: a slower driver is no help while a faster one works.
    size_t lead = lowest(left);
    uint64_t tier = 0;
    for (size_t r = lead; r < rails.size() && rails[r]->tier == rails[lead]->tier; ++r)
      tier |= left & rail_bit(r);
    left &= ~tier;
    for (uint64_t m = tier; m != 0; m &= m - 1) {
      size_t r = lowest(m);
      uint64_t until = rails[r]->paused_until_ns();
      if (until <= now && !rails[r]->on_trial()) continue;
      resting |= rail_bit(r);
      if (until < earliest) {
        earliest = until;
        first_up = r;
      }
    }
    if ((tier & ~resting) != 0) return best_of_tier(t, tier & ~resting, bytes, rail, probe);
  }
  // All are paused; the one whose pause ends first is the likeliest to work, and an answer is due now.
  *rail = first_up;
  return rails[first_up]->room(bytes) ? Pick::kRail : Pick::kFull;
}

Engine::Pick Engine::best_of_tier(const Transfer& t, uint64_t candidates, uint64_t bytes, size_t* rail,
                                  bool* probe) {
  const auto& rails = t.remote->peer()->rails();
  // A rail whose pause is over has its trial with the next slice, or it may never be tried again: what it
  // last showed may be far too slow to be chosen by. One small slice at a time, until one succeeds.
  for (uint64_t m = candidates; m != 0; m &= m - 1) {
    if (!rails[lowest(m)]->open()) continue;
    *rail = lowest(m);
    *probe = true;
    return Pick::kRail;
  }
  if ((candidates & (candidates - 1)) == 0) {
    *rail = lowest(candidates);
    return rails[*rail]->room(bytes) ? Pick::kRail : Pick::kFull;
  }
  // Counted are slices that are on their way: one that is picked for and must wait after all is picked for
  // again.
  uint64_t nth = t.remote->peer()->queue.placed + 1;
  *probe = policy_.probe_every != 0 && nth % policy_.probe_every == 0;
  size_t turn =
      *probe ? nth / policy_.probe_every % static_cast<size_t>(__builtin_popcountll(candidates)) : 0;
  double fastest = 0;
  for (uint64_t m = candidates; m != 0; m &= m - 1)
    fastest = std::max(fastest, rails[lowest(m)]->bandwidth());
  double best_time = 0;
  bool found = false;
  for (uint64_t m = candidates; m != 0; m &= m - 1) {
    size_t r = lowest(m);
    const Rail& way = *rails[r];
    if (*probe && turn-- == 0 && way.room(bytes)) {
      *rail = r;
      return Pick::kRail;
    }
    if (!way.room(bytes) || way.bandwidth() * policy_.slow_ratio < fastest) continue;
    double distance = numa_.penalty((*endpoints_)[way.endpoint]->numa_node(), t.local->numa_node);
    // Ties are broken by what is in flight in operations of any size; a nominal slice makes idle rails
    // differ.
    double time = way.predict(std::max(bytes, policy_.slice_bytes)) * distance;
    if (!found || time < best_time) {
      found = true;
      best_time = time;
      *rail = r;
    }
  }
  *probe = false;
  return found ? Pick::kRail : Pick::kFull;
}

uint64_t Engine::slice_limit(const Transfer& t, const Rail& way, bool probe, uint64_t* hard) const {
  uint64_t max_op = (*endpoints_)[way.endpoint]->caps().max_op_bytes;
  // A slice may have to go elsewhere, so it must suit every rail it could take.
  const auto& rails = t.remote->peer()->rails();
  uint64_t mates = 0;
  uint64_t alignment = 1;
  for (uint64_t m = t.rails; m != 0; m &= m - 1) {
    const Rail& other = *rails[lowest(m)];
    uint64_t limit = (*endpoints_)[other.endpoint]->caps().max_op_bytes;
    if (limit != 0) max_op = max_op == 0 ? limit : std::min(max_op, limit);
    mates += other.tier == way.tier;
    alignment = std::max<uint64_t>(alignment, (*endpoints_)[other.endpoint]->caps().alignment);
  }
  // Alone, a rail gets pieces large enough to be no burden and small enough to share it fairly.
  uint64_t limit = mates > 1 ? policy_.slice_bytes : std::max(policy_.slice_bytes, way.max_bytes() / 4);
  if (probe) limit = std::min(limit, kProbeBytes);
  // Where a block is cut, the next slice begins.
  auto aligned = [&](uint64_t bytes) { return std::max(bytes / alignment * alignment, alignment); };
  *hard = aligned(max_op == 0 ? ~uint64_t{0} : max_op);
  return std::min(aligned(limit), *hard);
}

}  // namespace mooncake
