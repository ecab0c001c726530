#include "shared.hpp"

namespace mooncake::efa {
namespace {

constexpr LinkSize kLinkSize{.transfers = 256, .sends = 16, .receives = 32};
constexpr uint64_t kLastWordsNs = 100'000'000;          // of a link that nobody uses any more
constexpr uint64_t kLateCompletionsNs = 2'000'000'000;  // after a link was closed

}  // namespace

Status Links::take(Link*& link) {
  Link* found = nullptr;
  for (const auto& each : open_) {
    if (each->broken) continue;
    if (each->closes_ns != 0 || open_.size() >= limit_) {
      if (found == nullptr || each->sessions < found->sessions) found = each.get();
    }
  }
  if (found == nullptr) {
    std::unique_ptr<Link> made;
    LinkSize size = kLinkSize;
    size.transfers = std::min(size.transfers, fabric_.transmit_size());
    if (Status status = Link::open(fabric_, size, made); !status.ok()) {
      // The device has no more: share what there is.
      for (const auto& each : open_) {
        if (!each->broken && (found == nullptr || each->sessions < found->sessions)) found = each.get();
      }
      if (found == nullptr) return status;
    } else {
      found = made.get();
      found->incoming = incoming_;
      open_.push_back(std::move(made));
    }
  }
  ++found->sessions;
  found->closes_ns = 0;
  link = found;
  return {};
}

void Links::release(Link& link, bool at_once) {
  if (--link.sessions == 0) link.closes_ns = now_ns() + (at_once ? 0 : kLastWordsNs);
}

void Links::tick(uint64_t now) {
  std::vector<Link*> due;
  for (const auto& link : open_) {
    if (link->closes_ns != 0 && (now >= link->closes_ns || link->broken)) due.push_back(link.get());
  }
  for (Link* link : due) close(*link);
  std::erase_if(closed_, [&](const auto& link) { return passed(link->closed_ns, now) > kLateCompletionsNs; });
}

void Links::close(Link& link) {
  auto at = std::find_if(open_.begin(), open_.end(), [&](const auto& each) { return each.get() == &link; });
  link.close();
  closed_.push_back(std::move(*at));
  open_.erase(at);
}

void Links::close_all() {
  for (const auto& link : open_) link->close();
  open_.clear();
  closed_.clear();
}

}  // namespace mooncake::efa
