// The function table that the engine calls. What each function promises is written in mooncake_driver.h.
#include "driver.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>

#include "completions.hpp"
#include "connection.hpp"
#include "regions.hpp"
#include "target.hpp"

namespace template_driver {
namespace {

struct Remote {
  mc_handle connection;
  uint64_t region_id;
  uint8_t key[MC_KEY_BYTES];
};

// One instance of the driver in one engine. Its members end in reverse order: connections first, then the
// target.
struct Endpoint {
  double timeout_s = 5.0;
  Completions completions;
  Regions regions;
  Target target{regions};
  std::mutex mutex;
  std::map<mc_handle, std::shared_ptr<Connection>> connections;
  std::map<mc_handle, Remote> remotes;
};

std::mutex endpoints_mutex;
std::map<mc_handle, std::shared_ptr<Endpoint>>& endpoints() {
  static auto* table = new std::map<mc_handle, std::shared_ptr<Endpoint>>;  // outlives static destructors
  return *table;
}

thread_local std::string last_reason;

mc_status report(Status status) {
  if (status.code != MC_OK) last_reason = std::move(status.reason);
  return status.code;
}

// Runs a body and lets no exception cross the ABI.
mc_status guarded(auto&& body) noexcept {
  try {
    return report(body());
  } catch (const std::exception& error) {
    return report({MC_NO_MEMORY, error.what()});
  }
}

std::shared_ptr<Endpoint> find(mc_handle handle) {
  std::lock_guard lock(endpoints_mutex);
  auto found = endpoints().find(handle);
  return found == endpoints().end() ? nullptr : found->second;
}

mc_status with_endpoint(mc_handle handle, auto&& body) noexcept {
  return guarded([&]() -> Status {
    std::shared_ptr<Endpoint> endpoint = find(handle);
    if (!endpoint) return {MC_INVALID, "no endpoint has this handle"};
    return body(*endpoint);
  });
}

Status set_option(Endpoint& endpoint, const mc_option& option) {
  if (std::string(option.name) != "timeout_s")
    return {MC_INVALID, std::string("unknown option ") + option.name};
  endpoint.timeout_s = std::strtod(option.value, nullptr);
  if (!(endpoint.timeout_s > 0)) return {MC_INVALID, "timeout_s must be a positive number of seconds"};
  return {};
}

mc_status open_endpoint(const mc_option* options, size_t count, mc_handle* handle) {
  return guarded([&]() -> Status {
    auto endpoint = std::make_shared<Endpoint>();
    for (size_t i = 0; i < count; ++i) {
      if (Status status = set_option(*endpoint, options[i]); status.code != MC_OK) return status;
    }
    if (Status status = endpoint->target.listen(); status.code != MC_OK) return status;
    std::lock_guard lock(endpoints_mutex);
    *handle = new_handle();
    endpoints()[*handle] = std::move(endpoint);
    return {};
  });
}

void close_endpoint(mc_handle handle) {
  std::shared_ptr<Endpoint> last;  // ends outside the lock: it joins threads
  std::lock_guard lock(endpoints_mutex);
  auto found = endpoints().find(handle);
  if (found == endpoints().end()) return;
  last = std::move(found->second);
  endpoints().erase(found);
}

mc_status caps(mc_handle handle, mc_caps* out) {
  return with_endpoint(handle, [&](Endpoint&) -> Status {
    mc_caps ours{};
    ours.struct_size = out->struct_size;
    ours.flags = MC_CAP_SAME_HOST_ONLY;
    ours.memory_kinds = 1u << MC_DRAM;
    ours.bandwidth_bytes_per_s = 1'000'000'000;
    ours.latency_ns = 50'000;
    ours.alignment = 1;
    ours.inline_bytes = 0;  // nothing is ever done when submit() returns
    ours.in_flight_bytes = 8 << 20;
    ours.in_flight_ops = 64;
    std::memcpy(out, &ours, std::min<size_t>(out->struct_size, sizeof ours));
    return {};
  });
}

mc_status stats(mc_handle handle, mc_stats* out) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    mc_stats ours = endpoint.completions.totals();
    ours.struct_size = out->struct_size;
    ours.refused = endpoint.target.refused();
    std::lock_guard lock(endpoint.mutex);
    ours.connections = static_cast<uint32_t>(endpoint.connections.size());
    std::memcpy(out, &ours, std::min<size_t>(out->struct_size, sizeof ours));
    return {};
  });
}

const char* last_error() { return last_reason.c_str(); }

mc_status export_address(mc_handle handle, void* blob, size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    const Address& address = endpoint.target.address();
    if (*length < address.size()) return {MC_INVALID, "there is no room for the address"};
    std::memcpy(blob, address.data(), address.size());
    *length = address.size();
    return {};
  });
}

mc_status connect_peer(mc_handle handle, const void* blob, size_t length, mc_handle* connection) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    Address peer;
    if (length != peer.size()) return {MC_INVALID, "not an address of the template driver"};
    std::memcpy(peer.data(), blob, length);
    auto made = std::make_shared<Connection>(peer, endpoint.timeout_s, endpoint.completions);
    std::lock_guard lock(endpoint.mutex);
    *connection = new_handle();
    endpoint.connections[*connection] = std::move(made);
    return {};
  });
}

void disconnect_peer(mc_handle handle, mc_handle connection) {
  with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    std::shared_ptr<Connection> last;
    std::lock_guard lock(endpoint.mutex);
    if (auto found = endpoint.connections.find(connection); found != endpoint.connections.end()) {
      last = std::move(found->second);
      endpoint.connections.erase(found);
    }
    return {};
  });
}

mc_status register_memory(mc_handle handle, const mc_memory* memory, mc_handle* registered) {
  return with_endpoint(handle, [&](Endpoint& endpoint) { return endpoint.regions.add(*memory, registered); });
}

mc_status deregister_memory(mc_handle handle, mc_handle registered, uint64_t deadline_ns) {
  return with_endpoint(handle,
                       [&](Endpoint& endpoint) { return endpoint.regions.remove(registered, deadline_ns); });
}

// Region id and access key travel without us; this is the place for what hardware adds to them, such as an
// rkey.
mc_status export_key(mc_handle handle, mc_handle registered, void*, size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    if (!endpoint.regions.has(registered)) return {MC_INVALID, "no memory is registered under this handle"};
    *length = 0;
    return {};
  });
}

mc_status import_key(mc_handle handle, mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                     const void*, size_t, mc_handle* remote) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    Remote named{connection, region_id, {}};
    std::memcpy(named.key, key, sizeof named.key);
    std::lock_guard lock(endpoint.mutex);
    if (!endpoint.connections.contains(connection)) return {MC_INVALID, "no connection has this handle"};
    *remote = new_handle();
    endpoint.remotes[*remote] = named;
    return {};
  });
}

void release_key(mc_handle handle, mc_handle remote) {
  with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    std::lock_guard lock(endpoint.mutex);
    endpoint.remotes.erase(remote);
    return {};
  });
}

Status start(Endpoint& endpoint, const mc_op& op) {
  Status status;
  Operation operation;
  operation.op = op;
  operation.local = endpoint.regions.use(op.local, op.local_offset, op.length, &status);
  if (!operation.local) return status;
  std::shared_ptr<Connection> connection;
  {
    std::lock_guard lock(endpoint.mutex);
    auto remote = endpoint.remotes.find(op.remote);
    auto found = endpoint.connections.find(op.connection);
    if (remote == endpoint.remotes.end() || found == endpoint.connections.end() ||
        remote->second.connection != op.connection) {
      return {MC_INVALID, "no such connection, or no such remote region on it"};
    }
    connection = found->second;
    operation.request = {kMagic, op.opcode, remote->second.region_id, op.remote_offset, op.length, {}};
    std::memcpy(operation.request.key, remote->second.key, sizeof remote->second.key);
  }
  connection->submit(std::move(operation));
  return {};
}

mc_status submit(mc_handle handle, const mc_op* ops, size_t count, size_t* accepted) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    for (size_t i = 0; i < count; ++i) {
      // What cannot even start is taken as well, and completes with its reason.
      if (Status status = start(endpoint, ops[i]); status.code != MC_OK)
        endpoint.completions.push(ops[i], 0, status);
    }
    *accepted = count;
    return {};
  });
}

mc_status poll(mc_handle handle, mc_completion* completions, size_t capacity, size_t* count) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    *count = endpoint.completions.poll(completions, capacity);
    return {};
  });
}

int event_fd(mc_handle handle) {
  std::shared_ptr<Endpoint> endpoint = find(handle);
  return endpoint ? endpoint->completions.event_fd() : -1;
}

mc_status arm(mc_handle handle) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    if (!endpoint.completions.arm()) return {MC_AGAIN, "completions are waiting"};
    return {};
  });
}

mc_status cancel(mc_handle handle, uint64_t cookie) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    std::lock_guard lock(endpoint.mutex);
    for (auto& [connection_handle, connection] : endpoint.connections) connection->cancel(cookie);
    return {};
  });
}

// What hardware adds to a lesser key goes into the blob, as in export_key.
mc_status grant(mc_handle handle, mc_handle registered, const uint8_t* key, uint32_t access, void*,
                size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    Status status = endpoint.regions.grant(registered, key, access);
    if (status.code == MC_OK) *length = 0;
    return status;
  });
}

mc_status revoke(mc_handle handle, mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  return with_endpoint(
      handle, [&](Endpoint& endpoint) { return endpoint.regions.revoke(registered, key, deadline_ns); });
}

// Names the connection's session to the target while a socket may hold bytes of a write that ended.
mc_status late_writes(mc_handle handle, mc_handle connection, void* token, size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    std::lock_guard lock(endpoint.mutex);
    auto found = endpoint.connections.find(connection);
    if (found == endpoint.connections.end()) return {MC_INVALID, "no connection has this handle"};
    uint64_t session = found->second->session();
    if (*length < sizeof session) return {MC_INVALID, "there is no room for the token"};
    *length = found->second->has_late_writes() ? sizeof session : 0;
    std::memcpy(token, &session, *length);
    return {};
  });
}

mc_status fence(mc_handle handle, const void* token, size_t length, uint64_t deadline_ns) {
  return with_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    uint64_t session;
    if (length != sizeof session) return {MC_INVALID, "not a token of the template driver"};
    std::memcpy(&session, token, sizeof session);
    if (endpoint.target.end_session(session, deadline_ns)) return {};
    return {MC_TIMEOUT, "a peer's connection is still being served"};
  });
}

}  // namespace

const mc_driver_v1* driver_table() {
  static const mc_driver_v1 table = {
      .abi_major = MC_ABI_MAJOR,
      .abi_minor = MC_ABI_MINOR,
      .struct_size = sizeof(mc_driver_v1),
      .name = "template",
      .open = open_endpoint,
      .close = close_endpoint,
      .caps = caps,
      .stats = stats,
      .last_error = last_error,
      .export_address = export_address,
      .connect = connect_peer,
      .disconnect = disconnect_peer,
      .register_memory = register_memory,
      .deregister_memory = deregister_memory,
      .export_key = export_key,
      .import_key = import_key,
      .release_key = release_key,
      .submit = submit,
      .poll = poll,
      .event_fd = event_fd,
      .arm = arm,
      .cancel = cancel,
      .grant = grant,
      .revoke = revoke,
      .submit_on_stream = nullptr,  // host memory follows no device stream
      .late_writes = late_writes,
      .fence = fence,
      .notify = nullptr,
      .poll_notices = nullptr,
  };
  return &table;
}

}  // namespace template_driver
