#include "links.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "support/os.hpp"

namespace mooncake::ascend {
namespace {

constexpr auto kRest = std::chrono::microseconds(20);
// Disconnect once it has failed: how long it may take, and how often. Other peers wait for it.
constexpr double kAgainWaitS = 0.2, kAgainS = 0.5;

int32_t in_ms(double seconds) { return static_cast<int32_t>(seconds * 1000); }

}  // namespace

bool Links::busy() const {
  return std::any_of(peers_.begin(), peers_.end(),
                     [](const auto& item) { return !item.second.running.empty(); });
}

bool Links::ending() const {
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& item) { return item.second.ending; });
}

void Links::begin(std::unique_ptr<Batch> batch, uint64_t ours) {
  const std::string& engine = batch->remote->engine;
  Peer& peer = peers_[engine];
  peer.forgotten = false;
  Status status = batch->remote->link->check_alive();
  if (status.ok()) status = connect(engine, peer, batch->remote->generation, ours);
  if (!status.ok()) return finish_(std::move(batch), std::move(status));
  status = check_hixl(acl_.shim->transfer(engine_, engine.c_str(), batch->opcode == MC_WRITE,
                                          batch->descs.data(), batch->descs.size(), &batch->request),
                      "TransferAsync");
  if (status.ok()) {
    batch->deadline_ns = driver::deadline_after(options_.transfer_timeout_s);
    return peer.running.push(std::move(batch));
  }
  drain(engine, peer);
  batch->failure = std::move(status);  // part of it may be under way
  peer.held.push(std::move(batch));
  end(peer.held.first()->remote->engine, peer);
}

Status Links::connect(const std::string& engine, Peer& peer, uint64_t theirs, uint64_t ours) {
  // What was registered after the link was made is not known on it.
  bool good = peer.connected && !peer.ending && peer.theirs >= theirs && peer.ours >= ours;
  if (good) return {};
  drain(engine, peer);
  if (!end(engine, peer))
    return failed(MC_UNREACHABLE, "HIXL has not ended the last link to " + engine +
                                      " yet (Disconnect fails, and is asked again); try again");
  Status status =
      check_hixl(acl_.shim->connect(engine_, engine.c_str(), in_ms(options_.answer_timeout_s)), "Connect");
  if (!status.ok()) return failed(MC_UNREACHABLE, status.reason + " to " + engine);
  peer.connected = true;
  peer.theirs = theirs;
  peer.ours = ours;
  return {};
}

bool Links::end(const std::string& engine, Peer& peer) {
  if (peer.connected) {
    if (peer.ending && driver::now_ns() < peer.again_ns) return false;
    double wait_s = peer.ending ? kAgainWaitS : options_.answer_timeout_s;
    uint32_t result = acl_.shim->disconnect(engine_, engine.c_str(), in_ms(wait_s));
    if (result != kHixlSuccess && result != kHixlNotConnected) {
      peer.ending = true;
      peer.again_ns = driver::deadline_after(kAgainS);
      return false;
    }
  }
  ended(peer);
  return true;
}

void Links::ended(Peer& peer) {
  peer.connected = peer.ending = false;
  while (auto batch = peer.held.pop()) {
    Status why = std::move(batch->failure);
    finish_(std::move(batch), std::move(why));
  }
  peer.lives.clear();
}

void Links::drain(const std::string& engine, Peer& peer) {
  while (!peer.running.empty()) {
    if (!look(engine, peer)) std::this_thread::sleep_for(kRest);
  }
}

void Links::look() {
  for (auto at = peers_.begin(); at != peers_.end();) {
    auto& [engine, peer] = *at;
    look(engine, peer);
    if (peer.ending) end(engine, peer);
    at = peer.forgotten && !peer.connected ? peers_.erase(at) : std::next(at);
  }
}

bool Links::look(const std::string& engine, Peer& peer) {
  if (peer.running.empty()) return false;
  const Batch& first = *peer.running.first();
  mc_ascend_state state = MC_ASCEND_WAITING;
  Status status = check_hixl(acl_.shim->query(engine_, first.request, &state), "GetTransferStatus");
  bool late = status.ok() && state == MC_ASCEND_WAITING && driver::now_ns() > first.deadline_ns;
  if (status.ok() && state == MC_ASCEND_WAITING && !late) return false;
  if (status.ok() && state != MC_ASCEND_COMPLETED)
    status = failed(MC_UNREACHABLE, state == MC_ASCEND_TIMEOUT || late
                                        ? "the transfer did not end in time (transfer_timeout_s)"
                                        : "the transfer failed; the peer or the link to it has gone");
  if (status.ok()) {
    finish_(peer.running.pop(), {});
    return true;
  }
  while (auto batch = peer.running.pop()) {
    batch->failure = status;
    peer.held.push(std::move(batch));
  }
  end(engine, peer);
  return true;
}

bool Links::end_all() {
  // First those that did not end before: the others would be made anew meanwhile, and know the memory again.
  bool all = true;
  for (auto& [engine, peer] : peers_) {
    if (peer.ending) all = end(engine, peer) && all;
  }
  if (!all) return false;
  for (auto& [engine, peer] : peers_) {
    drain(engine, peer);
    all = end(engine, peer) && all;
  }
  return all;
}

void Links::forget(const std::string& engine, std::shared_ptr<void> life) {
  auto found = peers_.find(engine);
  if (found == peers_.end()) return;
  Peer& peer = found->second;
  drain(engine, peer);
  peer.lives.push_back(std::move(life));
  peer.forgotten = true;
  if (end(engine, peer)) peers_.erase(found);
}

void Links::close() {
  for (auto& [engine, peer] : peers_) {
    drain(engine, peer);
    peer.again_ns = 0;
    end(engine, peer);
  }
}

void Links::finalized() {
  for (auto& [engine, peer] : peers_) ended(peer);
  peers_.clear();
}

}  // namespace mooncake::ascend
