#include "fabric.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>

namespace mooncake::fake {

namespace {

std::pair<std::string, std::string> ordered(const std::string& one, const std::string& other) {
  return one < other ? std::pair(one, other) : std::pair(other, one);
}

std::chrono::steady_clock::time_point at_ns(uint64_t ns) {
  // Half of what fits: the clock may add to it.
  constexpr uint64_t kLatest = uint64_t{1} << 62;
  return std::chrono::steady_clock::time_point(std::chrono::nanoseconds(std::min(ns, kLatest)));
}

}  // namespace

uint64_t new_number() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

Fabric::Fabric(uint64_t seed, bool manual_clock) : manual_(manual_clock), owner_(getpid()), random_(seed) {
  if (!manual_) thread_ = std::thread([this] { run(); });
}

Fabric::~Fabric() { stop(); }

void Fabric::stop() {
  if (getpid() != owner_) {  // a forked child has no such thread, and the lock may be held for ever
    if (thread_.joinable()) thread_.detach();
    return;
  }
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    // What is held, or was released and did not get its turn, gets none now.
    for (auto& [due, event] : events_) {
      if (event.operation && event.operation->running) leave(*event.operation);
    }
    for (const auto& operation : inside_) leave(*operation);
    inside_.clear();
    end_matching([](const Operation&) { return true; }, {MC_UNREACHABLE, "the fake fabric was closed"});
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

// ---- time

uint64_t Fabric::now() const {
  if (manual_) return manual_now_ns_;
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

uint64_t Fabric::now_ns() {
  std::lock_guard lock(mutex_);
  return now();
}

void Fabric::at(uint64_t due, Event event) {
  events_.emplace(std::pair(due, ++sequence_), std::move(event));
  changed_.notify_all();
}

void Fabric::run() {
  Lock lock(mutex_);
  while (!stopping_) {
    if (events_.empty()) {
      changed_.wait(lock);
    } else if (uint64_t due = events_.begin()->first.first; due > now()) {
      changed_.wait_until(lock, at_ns(due));
    } else {
      handle_due(lock, due);
    }
  }
}

void Fabric::advance(uint64_t ns) {
  Lock lock(mutex_);
  uint64_t until = manual_now_ns_ + ns;
  handle_due(lock, until);
  manual_now_ns_ = std::max(manual_now_ns_, until);
}

void Fabric::handle_due(Lock& lock, uint64_t until) {
  while (!events_.empty() && events_.begin()->first.first <= until && !stopping_) {
    auto node = events_.extract(events_.begin());
    if (manual_) manual_now_ns_ = std::max(manual_now_ns_, node.key().first);
    Event& event = node.mapped();
    if (event.operation) {
      deliver(lock, event.operation);
    } else {
      event.device->serving = false;
      serve(*event.device);
    }
  }
}

// ---- devices and links

Device& Fabric::device(const std::string& name) {
  auto& found = devices_[name];
  if (!found) {
    found = std::make_unique<Device>();
    found->name = name;
  }
  return *found;
}

std::vector<std::string> Fabric::devices() {
  std::lock_guard lock(mutex_);
  std::vector<std::string> names;
  for (const auto& [name, known] : devices_) names.push_back(name);
  return names;
}

void Fabric::set_alive(const std::string& name, bool alive) {
  std::lock_guard lock(mutex_);
  device(name).behaviour.alive = alive;
  if (alive) return;
  auto touches = [&](const Operation& operation) {
    return operation.from->device->name == name || operation.connection.peer_device == name;
  };
  end_matching(touches, {MC_UNREACHABLE, "device " + name + " has died"});
}

void Fabric::set_frozen(const std::string& name, bool frozen) {
  std::lock_guard lock(mutex_);
  device(name).behaviour.frozen = frozen;
  if (!frozen) release_held();
}

void Fabric::set_holding(const std::string& name, bool holding) {
  std::lock_guard lock(mutex_);
  device(name).behaviour.holding = holding;
  if (!holding) release_inside(name);
}

size_t Fabric::held_in(const std::string& name) {
  std::lock_guard lock(mutex_);
  return static_cast<size_t>(std::count_if(inside_.begin(), inside_.end(), [&](const auto& operation) {
    return operation->connection.peer_device == name;
  }));
}

void Fabric::release_inside(const std::string& name) {
  std::erase_if(inside_, [&](const auto& operation) {
    if (operation->connection.peer_device != name) return false;
    at(now(), {operation, nullptr});
    return true;
  });
}

void Fabric::set_link(const std::string& one, const std::string& other, bool up) {
  std::lock_guard lock(mutex_);
  if (up) {
    links_down_.erase(ordered(one, other));
    return;
  }
  links_down_.insert(ordered(one, other));
  auto uses = [&](const Operation& operation) {
    return ordered(operation.from->device->name, operation.connection.peer_device) == ordered(one, other);
  };
  end_matching(uses, {MC_UNREACHABLE, "the link between " + one + " and " + other + " is down"});
}

bool Fabric::link_up(const std::string& one, const std::string& other) const {
  return !links_down_.contains(ordered(one, other));
}

void Fabric::release_held() {
  auto held = std::move(held_);
  held_.clear();
  for (auto& operation : held) at(now(), {std::move(operation), nullptr});
}

// ---- endpoints

Result Fabric::open(const Settings& settings, std::shared_ptr<Endpoint>* out) {
  auto endpoint = std::make_shared<Endpoint>();
  std::lock_guard lock(mutex_);
  if (stopping_) return {MC_CLOSED, "the fake fabric was closed"};
  Device& opened = device(settings.device);
  if (opened.endpoint != nullptr) {
    return {MC_INVALID, "device " + settings.device + " is open already; give each engine a host of its own"};
  }
  opened.endpoint = endpoint.get();
  endpoint->fabric = shared_from_this();
  endpoint->device = &opened;
  endpoint->number = new_number();
  endpoint->settings = settings;
  endpoints_[endpoint->number] = endpoint.get();
  *out = std::move(endpoint);
  return {};
}

void Fabric::close(Endpoint& endpoint) {
  Lock lock(mutex_);
  endpoint.closing = true;
  endpoints_.erase(endpoint.number);
  auto touches = [&](const Operation& operation) {
    return operation.from == &endpoint || operation.connection.peer_endpoint == endpoint.number;
  };
  end_matching(touches, {MC_UNREACHABLE, "the engine behind " + endpoint.device->name + " was closed"});
  changed_.wait(lock, [&] {
    return endpoint.running == 0 && std::all_of(endpoint.memory.begin(), endpoint.memory.end(),
                                                [](auto& entry) { return entry.second->uses() == 0; });
  });
  endpoint.device->waiting.clear();
  endpoint.device->endpoint = nullptr;
  std::erase_if(held_, [](const auto& operation) { return operation->ended; });
  std::erase_if(notices_, [](const auto& operation) { return operation->ended; });
}

Result Fabric::connect(Endpoint& endpoint, uint64_t peer, const std::string& device, mc_handle* out) {
  std::lock_guard lock(mutex_);
  *out = new_number();
  endpoint.connections[*out] = {peer, device, {}};
  return {};
}

void Fabric::disconnect(Endpoint& endpoint, mc_handle connection) {
  Lock lock(mutex_);
  auto uses = [&](const Operation& operation) {
    return operation.from == &endpoint && operation.op.connection == connection;
  };
  end_matching(uses, {MC_CLOSED, "the connection was closed"});
  endpoint.connections.erase(connection);
}

// ---- memory

Result Fabric::add_memory(Endpoint& endpoint, const mc_memory& memory, mc_handle* out) {
  if ((endpoint.settings.caps.memory_kinds >> memory.kind & 1) == 0) {
    return {MC_UNSUPPORTED, "this device does not take memory of kind " + std::to_string(memory.kind)};
  }
  auto added = std::make_shared<Memory>(memory, endpoint.settings.cuda_is_host);
  std::lock_guard lock(mutex_);
  *out = new_number();
  endpoint.memory[*out] = std::move(added);
  return {};
}

Result Fabric::remove_memory(Endpoint& endpoint, mc_handle handle, uint64_t deadline_ns) {
  Lock lock(mutex_);
  auto found = endpoint.memory.find(handle);
  if (found == endpoint.memory.end()) return {MC_INVALID, "no memory has this handle"};
  std::shared_ptr<Memory> memory = found->second;
  memory->closing = true;
  if (!changed_.wait_until(lock, at_ns(deadline_ns), [&] { return memory->uses() == 0; })) {
    return {MC_TIMEOUT, std::to_string(memory->uses()) + " operations of peers still run on it"};
  }
  endpoint.memory.erase(handle);
  return {};
}

Result Fabric::grant(Endpoint& endpoint, mc_handle handle, const uint8_t* key, uint32_t access) {
  std::lock_guard lock(mutex_);
  auto found = endpoint.memory.find(handle);
  if (found == endpoint.memory.end()) return {MC_INVALID, "no memory has this handle"};
  if (found->second->closing) return {MC_REFUSED, "the memory is being deregistered"};
  if (found->second->find(key) >= 0) return {MC_INVALID, "this key was granted before"};
  found->second->grant(key, access);
  return {};
}

Result Fabric::revoke(Endpoint& endpoint, mc_handle handle, const uint8_t* key, uint64_t deadline_ns) {
  Lock lock(mutex_);
  auto found = endpoint.memory.find(handle);
  if (found == endpoint.memory.end()) return {MC_INVALID, "no memory has this handle"};
  std::shared_ptr<Memory> memory = found->second;
  int index = key == nullptr ? -1 : memory->find(key);
  if (key != nullptr && index < 0) return {MC_INVALID, "this key was never granted"};
  for (size_t i = 0; i < memory->keys().size(); ++i) {
    if (index < 0 || i == static_cast<size_t>(index)) memory->keys()[i].revoked = true;
  }
  if (deadline_ns == 0) return {};
  auto unused = [&] {
    return index < 0 ? memory->uses() == 0 : memory->keys()[static_cast<size_t>(index)].uses == 0;
  };
  if (changed_.wait_until(lock, at_ns(deadline_ns), unused)) return {};
  return {MC_TIMEOUT, "the key is revoked, but operations under it still run"};
}

bool Fabric::has_memory(Endpoint& endpoint, mc_handle handle) {
  std::lock_guard lock(mutex_);
  return endpoint.memory.contains(handle);
}

Result Fabric::import_key(Endpoint& endpoint, const Remote& remote, mc_handle* out) {
  std::lock_guard lock(mutex_);
  if (!endpoint.connections.contains(remote.connection)) return {MC_INVALID, "no connection has this handle"};
  *out = new_number();
  endpoint.remotes[*out] = remote;
  return {};
}

void Fabric::release_key(Endpoint& endpoint, mc_handle remote) {
  std::lock_guard lock(mutex_);
  endpoint.remotes.erase(remote);
}

mc_stats Fabric::stats(Endpoint& endpoint) {
  std::lock_guard lock(mutex_);
  const Counters& counters = endpoint.device->counters;
  mc_stats stats{};
  stats.connections = static_cast<uint32_t>(endpoint.connections.size());
  stats.ops = counters.completed + counters.errors;
  stats.bytes_read = counters.bytes_read;
  stats.bytes_written = counters.bytes_written;
  stats.errors = counters.errors;
  stats.refused = counters.refused;
  return stats;
}

}  // namespace mooncake::fake
