#include "late_writes.hpp"

#include <algorithm>
#include <utility>

#include "peer.hpp"

namespace mooncake {

namespace {

// A connection that works soon has the answers that show that nothing is left of a cancelled write; a fence
// would break it. One that hangs has none.
constexpr uint64_t kGraceNs = 100'000'000;
constexpr uint64_t kRefreshNs = 1'000'000;

}  // namespace

void LateWrites::note(Peer& peer, size_t rail, bool broken) {
  const Rail& way = *peer.rails()[rail];
  if (!peer.endpoint(way).leaves_late_writes()) return;
  std::lock_guard lock(mutex_);
  refreshed_ns_ = 0;
  for (Way& known : ways_) {
    if (known.peer != &peer || known.rail != rail) continue;
    ++known.failures;
    known.broken |= broken;
    return;
  }
  ways_.push_back({next_id_++,
                   &peer,
                   rail,
                   peer.endpoint(way).name(),
                   way.remote_device,
                   way.label,
                   {},
                   1,
                   broken,
                   now_ns()});
  any_ = true;
}

void LateWrites::orphan(Peer& peer) {
  if (!any()) return;
  std::lock_guard lock(mutex_);
  refresh();
  for (Way& way : ways_) {
    if (way.peer == &peer) way.peer = nullptr;
  }
}

// Asks the drivers what is left.
void LateWrites::refresh() {
  std::erase_if(ways_, [](Way& way) {
    if (way.peer == nullptr) return false;
    Status asked = way.peer->late_writes(way.rail, &way.token);
    return asked.ok() && way.token.empty();
  });
  any_ = !ways_.empty();
}

uint64_t LateWrites::open_rails(Peer& peer, uint64_t now) {
  std::lock_guard lock(mutex_);
  if (now - refreshed_ns_ > kRefreshNs) {
    refresh();
    refreshed_ns_ = now;
  }
  if (ways_.empty()) return kAllRails;
  bool alone = ways_.size() == 1 && ways_[0].peer == &peer;
  return alone ? uint64_t{1} << ways_[0].rail : 0;
}

bool LateWrites::ask(uint64_t now) {
  std::lock_guard lock(mutex_);
  bool due = std::any_of(ways_.begin(), ways_.end(), [&](const Way& way) {
    return way.broken || way.peer == nullptr || way.since_ns + kGraceNs <= now;
  });
  return due && !std::exchange(asking_, true);
}

std::vector<LateWrites::Order> LateWrites::orders() {
  std::vector<Order> orders;
  std::lock_guard lock(mutex_);
  refresh();
  for (const Way& way : ways_) {
    if (!way.token.empty()) orders.push_back({way.id, way.failures, way.driver, way.device, way.token});
  }
  return orders;
}

void LateWrites::answered(const Status& status) {
  std::lock_guard lock(mutex_);
  asking_ = false;
  bool unnamed = std::any_of(ways_.begin(), ways_.end(), [](const Way& way) { return way.token.empty(); });
  if (status.ok() && !unnamed) return;
  ++failed_;
  failure_ = status.ok() ? "a driver does not say what to fence" : status.reason;
}

void LateWrites::fenced(const std::vector<Order>& orders) {
  std::lock_guard lock(mutex_);
  std::erase_if(ways_, [&](const Way& way) {
    auto names = [&](const Order& order) { return order.way == way.id && order.failures == way.failures; };
    if (std::none_of(orders.begin(), orders.end(), names)) return false;
    // Its connection is gone at the other end, which shows when it is used next.
    if (way.peer != nullptr) way.peer->rails()[way.rail]->suspect(way.peer->policy());
    return true;
  });
  any_ = !ways_.empty();
}

uint64_t LateWrites::failed_questions() const {
  std::lock_guard lock(mutex_);
  return failed_;
}

std::string LateWrites::explain() const {
  std::lock_guard lock(mutex_);
  std::string labels;
  for (const Way& way : ways_) labels += (labels.empty() ? "" : ", ") + way.label;
  std::string text = "bytes of writes that failed or were cancelled over " + labels + " may still reach it";
  return failure_.empty() ? text : text + ", and they could not be fenced: " + failure_;
}

}  // namespace mooncake
