// Notices in the fabric: they take the way of an operation, and arrive when the writes before them have.
#include <algorithm>

#include "fabric.hpp"

namespace mooncake::fake {

namespace {

constexpr uint64_t kRetryNs = 100'000;  // while the target has no room

bool take(uint64_t& left) {
  if (left == 0) return false;
  --left;
  return true;
}

}  // namespace

Result Fabric::notify(Endpoint& endpoint, mc_handle connection, std::string bytes, uint64_t cookie) {
  Lock lock(mutex_);
  if (endpoint.closing || stopping_) return {MC_CLOSED, "the endpoint is closed"};
  auto known = endpoint.connections.find(connection);
  if (known == endpoint.connections.end()) return {MC_INVALID, "no connection has this handle"};
  Device& device = *endpoint.device;
  if (bytes.empty() || bytes.size() > endpoint.settings.caps.notice_bytes) {
    return {MC_INVALID,
            "a notice has 1 to " + std::to_string(endpoint.settings.caps.notice_bytes) + " bytes"};
  }
  if (endpoint.settings.queue_ops != 0 && device.counters.in_flight >= endpoint.settings.queue_ops)
    return {MC_AGAIN, "the queue is full"};
  auto operation = std::make_shared<Operation>();
  operation->op.cookie = cookie;
  operation->op.connection = connection;
  operation->op.opcode = MC_WRITE;
  operation->from = &endpoint;
  operation->connection = known->second;
  operation->notice = std::move(bytes);
  for (const auto& [at, before] : endpoint.operations) {
    bool write = before->op.opcode == MC_WRITE && before->notice.empty();
    if (write && before->op.connection == connection) operation->behind.push_back(before);
  }
  // A write that failed counts until whoever submitted it can know.
  std::erase_if(known->second.failed, [&](uint64_t write) { return !endpoint.completions.waits(write); });
  operation->failed = !known->second.failed.empty();
  endpoint.operations.emplace(cookie, operation);
  device.waiting.push_back(operation);
  count_start(endpoint, 0);
  serve(device);
  if (!manual_ && endpoint.settings.caps.inline_bytes != 0) handle_due(lock, now());
  return {};
}

// Whether a write before it is still under way.
bool Fabric::overtakes(const Operation& notice) const {
  return std::any_of(notice.behind.begin(), notice.behind.end(),
                     [](const auto& write) { return !write->ended; });
}

void Fabric::release_waiting_notices() {
  auto due = std::stable_partition(notices_.begin(), notices_.end(),
                                   [&](const auto& notice) { return !notice->ended && overtakes(*notice); });
  for (auto notice = due; notice != notices_.end(); ++notice) at(now(), {*notice, nullptr});
  notices_.erase(due, notices_.end());
}

void Fabric::deliver_notice(const std::shared_ptr<Operation>& operation, Endpoint& target) {
  Behaviour& near = operation->from->device->behaviour;
  if (overtakes(*operation)) return notices_.push_back(operation);
  bool spoilt = operation->failed;
  for (const auto& write : operation->behind) spoilt |= write->failed;
  if (spoilt) return end(operation, 0, {MC_UNREACHABLE, "a write before the notice failed"});
  if (take(near.fail_notices)) return end(operation, 0, {MC_UNREACHABLE, "an injected error"});
  bool first = target.device->behaviour.reorder && random_() % 2 == 0;
  if (!target.completions.push_notice(operation->notice, !first, target.settings.notice_room))
    return at(now() + kRetryNs, {operation, nullptr});
  ++operation->from->device->counters.notices;
  if (take(near.lose_notices)) return;
  if (take(near.doubtful_notices))
    return end(operation, 0, {MC_UNREACHABLE, "an injected error, after the delivery"});
  end(operation, 0, {});
}

void Fabric::inject_notice(const std::string& name, const std::string& bytes) {
  std::lock_guard lock(mutex_);
  if (Endpoint* endpoint = device(name).endpoint) endpoint->completions.push_notice(bytes, true, ~size_t{0});
}

}  // namespace mooncake::fake
