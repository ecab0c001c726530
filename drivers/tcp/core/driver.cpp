#include "driver.hpp"

#include <algorithm>
#include <cstring>
#include <exception>
#include <new>

#include "endpoint.hpp"
#include "support/os.hpp"

namespace mooncake_tcp {

namespace {

thread_local char last_error_text[512] = "";

void set_last_error(const char* text) noexcept {
  strncpy(last_error_text, text, sizeof(last_error_text) - 1);
}

HandleTable<Endpoint>& endpoints() { return mooncake::driver::of_this_process<HandleTable<Endpoint>>(); }

// Runs `body`, a function of nothing to Status, and keeps what it says for last_error(). No exception leaves
// the driver.
template <typename Body>
mc_status guarded(Body&& body) noexcept {
  try {
    Status status = body();
    if (!status.ok()) set_last_error(status.reason.c_str());
    return status.code;
  } catch (const std::bad_alloc&) {
    set_last_error("out of memory");
    return MC_NO_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(error.what());
    return MC_IO;
  }
}

// The same with the endpoint of a handle.
template <typename Body>
mc_status on_endpoint(mc_handle handle, Body&& body) noexcept {
  return guarded([&]() -> Status {
    std::shared_ptr<Endpoint> endpoint = endpoints().find(handle);
    if (endpoint) return body(*endpoint);
    if (mooncake::driver::fork_generation() > 1)
      return {MC_CLOSED, "there is no such endpoint in this forked process; open one of its own"};
    return {MC_INVALID, "there is no such endpoint"};
  });
}

Status copy_out(const std::string& bytes, void* blob, size_t* length) {
  if (blob == nullptr || length == nullptr || *length < bytes.size()) {
    return {MC_INVALID, "the buffer is smaller than " + std::to_string(bytes.size()) + " bytes"};
  }
  memcpy(blob, bytes.data(), bytes.size());
  *length = bytes.size();
  return {};
}

mc_status open_endpoint(const mc_option* options, size_t count, mc_handle* endpoint) {
  return guarded([&]() -> Status {
    Options parsed;
    Status status = parse_options(options, count, &parsed);
    if (!status.ok()) return status;
    std::shared_ptr<Endpoint> opened;
    status = Endpoint::open(parsed, &opened);
    if (status.ok()) *endpoint = endpoints().add(std::move(opened));
    return status;
  });
}

void close_endpoint(mc_handle handle) {
  guarded([&]() -> Status {
    // A forked child has none of its parent's: it cannot take apart what threads were in the middle of.
    if (std::shared_ptr<Endpoint> endpoint = endpoints().remove(handle)) endpoint->close();
    return {};
  });
}

mc_status caps(mc_handle handle, mc_caps* caps) {
  return on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    endpoint.caps(caps);
    return {};
  });
}

mc_status stats(mc_handle handle, mc_stats* stats) {
  return on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    endpoint.stats(stats);
    return {};
  });
}

const char* last_error() { return last_error_text; }

mc_status export_address(mc_handle handle, void* blob, size_t* length) {
  return on_endpoint(handle,
                     [&](Endpoint& endpoint) { return copy_out(endpoint.address_blob(), blob, length); });
}

mc_status connect_peer(mc_handle handle, const void* address, size_t length, mc_handle* connection) {
  return on_endpoint(handle,
                     [&](Endpoint& endpoint) { return endpoint.connect(address, length, connection); });
}

void disconnect_peer(mc_handle handle, mc_handle connection) {
  on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    endpoint.disconnect(connection);
    return {};
  });
}

mc_status register_memory(mc_handle handle, const mc_memory* memory, mc_handle* registered) {
  return on_endpoint(handle,
                     [&](Endpoint& endpoint) { return endpoint.register_memory(*memory, registered); });
}

mc_status deregister_memory(mc_handle handle, mc_handle registered, uint64_t deadline_ns) {
  return on_endpoint(handle,
                     [&](Endpoint& endpoint) { return endpoint.deregister_memory(registered, deadline_ns); });
}

mc_status export_key(mc_handle handle, mc_handle registered, void*, size_t* length) {
  return on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    if (!endpoint.is_registered(registered)) return {MC_INVALID, "there is no such registration"};
    *length = 0;  // region id and access key say everything
    return {};
  });
}

mc_status import_key(mc_handle handle, mc_handle connection, uint64_t region_id,
                     const uint8_t key[MC_KEY_BYTES], uint64_t region_length, const void*, size_t,
                     mc_handle* remote) {
  return on_endpoint(handle, [&](Endpoint& endpoint) {
    return endpoint.import_key(connection, region_id, key, region_length, remote);
  });
}

void release_key(mc_handle handle, mc_handle remote) {
  on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    endpoint.release_key(remote);
    return {};
  });
}

mc_status submit(mc_handle handle, const mc_op* ops, size_t count, size_t* accepted) {
  return on_endpoint(handle, [&](Endpoint& endpoint) { return endpoint.submit(ops, count, accepted); });
}

mc_status poll(mc_handle handle, mc_completion* completions, size_t capacity, size_t* count) {
  return on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    *count = endpoint.poll(completions, capacity);
    return {};
  });
}

int event_fd(mc_handle handle) {
  int fd = -1;
  on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    fd = endpoint.event_fd();
    return {};
  });
  return fd;
}

mc_status arm(mc_handle handle) {
  return on_endpoint(handle,
                     [](Endpoint& endpoint) -> Status { return {endpoint.arm() ? MC_OK : MC_AGAIN, {}}; });
}

mc_status cancel(mc_handle handle, uint64_t cookie) {
  return on_endpoint(handle, [&](Endpoint& endpoint) { return endpoint.cancel(cookie); });
}

mc_status grant(mc_handle handle, mc_handle registered, const uint8_t key[MC_KEY_BYTES], uint32_t access,
                void*, size_t* length) {
  return on_endpoint(handle, [&](Endpoint& endpoint) -> Status {
    if (length == nullptr) return {MC_INVALID, "the length is missing"};
    Status status = endpoint.grant(registered, key, access);
    if (status.ok()) *length = 0;
    return status;
  });
}

mc_status revoke(mc_handle handle, mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  return on_endpoint(handle,
                     [&](Endpoint& endpoint) { return endpoint.revoke(registered, key, deadline_ns); });
}

mc_status late_writes(mc_handle handle, mc_handle connection, void* token, size_t* length) {
  return on_endpoint(handle, [&](Endpoint& endpoint) {
    std::string bytes;
    Status status = endpoint.late_writes(connection, &bytes);
    return status.ok() ? copy_out(bytes, token, length) : status;
  });
}

mc_status fence(mc_handle handle, const void* token, size_t length, uint64_t deadline_ns) {
  return on_endpoint(handle, [&](Endpoint& endpoint) { return endpoint.fence(token, length, deadline_ns); });
}

constexpr mc_driver_v1 kTable = {
    .abi_major = MC_ABI_MAJOR,
    .abi_minor = MC_ABI_MINOR,
    .struct_size = sizeof(mc_driver_v1),
    .name = "tcp",
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
    .submit_on_stream = nullptr,
    .late_writes = late_writes,
    .fence = fence,
    .notify = nullptr,
    .poll_notices = nullptr,
};

}  // namespace

const mc_driver_v1* driver_table() { return &kTable; }

}  // namespace mooncake_tcp
