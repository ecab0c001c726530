#include "sessions.hpp"

#include <algorithm>

#include "incoming.hpp"

namespace mooncake_tcp {

bool Sessions::enter(const Header& hello, const std::shared_ptr<Incoming>& connection,
                     std::vector<std::shared_ptr<Incoming>>* older) {
  std::lock_guard lock(mutex_);
  auto& entries = lanes_[{hello.session(), hello.lane()}];
  for (const Entry& entry : entries) {
    if (entry.generation >= hello.generation()) return false;  // this one was given up, and only arrives late
  }
  for (const Entry& entry : entries) {
    if (auto owner = entry.owner.lock()) older->push_back(std::move(owner));
  }
  entries.push_back({hello.generation(), connection.get(), connection});
  return true;
}

std::vector<std::shared_ptr<Incoming>> Sessions::named(const FenceToken& token) {
  std::vector<std::shared_ptr<Incoming>> found;
  std::lock_guard lock(mutex_);
  for (const auto& [number, generation] : token.lanes) {
    auto lane = lanes_.find({token.session, number});
    if (lane == lanes_.end()) continue;
    for (const Entry& entry : lane->second) {
      if (entry.generation > generation) continue;
      if (auto owner = entry.owner.lock()) found.push_back(std::move(owner));
    }
  }
  return found;
}

void Sessions::leave(const Header& hello, const Incoming* connection) {
  std::lock_guard lock(mutex_);
  auto lane = lanes_.find({hello.session(), hello.lane()});
  if (lane == lanes_.end()) return;
  std::erase_if(lane->second, [&](const Entry& entry) { return entry.connection == connection; });
  if (lane->second.empty()) lanes_.erase(lane);
}

}  // namespace mooncake_tcp
