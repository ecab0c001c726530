// Messages that drivers have brought, on their way to the channel's handlers.
#include <poll.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <map>

#include "channel.hpp"
#include "engine.hpp"

namespace mooncake {

namespace {

constexpr size_t kMostAtOnce = 4096;  // then whoever fetches looks after the rest of its work
constexpr timespec kNap{0, 1'000'000};

std::string token_of(const std::string& notice) { return notice.substr(0, kNoticeTokenBytes); }

// 0 for what is no notice; it is dropped whenever it is delivered.
uint64_t sequence_of(const std::string& notice) {
  NoticeView view;
  return view.parse(notice.data(), notice.size()) ? view.sequence : 0;
}

}  // namespace

bool Engine::listening() const { return has_notices_ && channel_->awaits_notices(); }

// Drivers give them out in no order, yet one that was sent after another was delivered comes after it: when
// the later one has been fetched, the earlier one is there to be fetched. So what a round brings is delivered
// after the next round, together with what that one shows to have been sent before.
size_t Engine::fetch_notices(bool wait_for_turn) {
  std::unique_lock turn(fetching_, std::defer_lock);
  if (wait_for_turn) {
    turn.lock();
  } else if (channel_->backlogged() || !turn.try_lock()) {
    return 0;
  }
  size_t total = 0;
  std::vector<Fetched> fresh;
  for (int round = 1;; ++round) {
    fresh.clear();
    for (size_t e = 0; e < endpoints_->size(); ++e) {
      Endpoint& endpoint = *(*endpoints_)[e];
      if (!endpoint.has_notices()) continue;
      endpoint.poll_notices([&](const char* data, size_t length) {
        fresh.push_back({e, sequence_of({data, length}), {data, length}});
      });
    }
    if (fresh.empty() && fetched_.empty()) return total;
    std::map<std::string, uint64_t> newest;
    for (const Fetched& known : fetched_) {
      uint64_t& last = newest[token_of(known.bytes)];
      last = std::max(last, known.sequence);
    }
    auto later = std::partition(fresh.begin(), fresh.end(), [&](const Fetched& one) {
      auto known = newest.find(token_of(one.bytes));
      return known != newest.end() && one.sequence < known->second;
    });
    std::move(fresh.begin(), later, std::back_inserter(fetched_));
    fresh.erase(fresh.begin(), later);
    total += fetched_.size();
    deliver_fetched();
    fetched_.swap(fresh);
    if (total >= kMostAtOnce && round > 1) {
      kick();  // some are left that no driver tells of any more
      return total;
    }
  }
}

void Engine::deliver_fetched() {
  std::stable_sort(fetched_.begin(), fetched_.end(),
                   [](const Fetched& a, const Fetched& b) { return a.sequence < b.sequence; });
  for (const Fetched& one : fetched_) {
    Endpoint& endpoint = *(*endpoints_)[one.endpoint];
    bool taken = channel_->take_notice(one.bytes.data(), one.bytes.size());
    (taken ? endpoint.notices_received : endpoint.notices_dropped).fetch_add(1, std::memory_order_relaxed);
  }
  fetched_.clear();
}

// arm() failed: perhaps for notices, which must be fetched then, or wait while the handlers are behind.
void Engine::make_room_for_notices() {
  if (!has_notices_) return;
  if (fetch_notices(false) == 0 && channel_->backlogged()) ppoll(nullptr, 0, &kNap, nullptr);
}

}  // namespace mooncake
