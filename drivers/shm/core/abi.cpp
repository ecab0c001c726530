#include "abi.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "endpoint.hpp"
#include "handles.hpp"
#include "status.hpp"

namespace mooncake::shm {
namespace {

// Some milliseconds of copying: enough for every copy thread, little enough to leave the order to the engine.
constexpr uint64_t kInFlightBytes = 64 << 20;

// Never destroyed: the engine may call until the process ends, after static destructors have run.
HandleTable<Endpoint>& endpoints() {
  static auto* table = new HandleTable<Endpoint>;
  return *table;
}

std::string& last_reason() {
  thread_local std::string reason;
  return reason;
}

// No exception may cross the ABI.
template <class Body>
mc_status guarded(Body&& body) noexcept {
  try {
    Status status = body();
    if (!status.ok()) last_reason() = std::move(status.reason);
    return status.code;
  } catch (const std::bad_alloc&) {
    last_reason() = "out of memory";  // short enough to need none
    return MC_NO_MEMORY;
  } catch (...) {
    // What remains are the locks of the standard library, which fail only when the process is beyond repair.
    last_reason() = "a lock failed";
    return MC_IO;
  }
}

// The pointer holds until close(), which by contract no call overlaps.
Status find_endpoint(mc_handle handle, Endpoint*& endpoint) {
  const std::shared_ptr<Endpoint>* found = endpoints().find(handle);
  if (found == nullptr) return failed(MC_INVALID, "no endpoint has this handle");
  if ((*found)->forked())
    return failed(MC_CLOSED, "the endpoint belongs to the parent of this forked process; open one here");
  endpoint = found->get();
  return {};
}

template <class Body>
mc_status with_endpoint(mc_handle handle, Body&& body) noexcept {
  return guarded([&] {
    Endpoint* endpoint = nullptr;
    if (Status status = find_endpoint(handle, endpoint); !status.ok()) return status;
    return body(*endpoint);
  });
}

Status missing(const char* what) { return failed(MC_INVALID, std::string("argument ") + what + " is null"); }

mc_status open_endpoint(const mc_option* options, size_t count, mc_handle* endpoint) {
  return guarded([&] {
    if (endpoint == nullptr) return missing("endpoint");
    std::shared_ptr<Endpoint> made;
    if (Status status = Endpoint::open(options, count, made); !status.ok()) return status;
    mc_handle handle = endpoints().add(std::move(made));
    if (handle == 0) return failed(MC_NO_MEMORY, "there are as many endpoints as there can be");
    *endpoint = handle;
    return Status{};
  });
}

void close_endpoint(mc_handle handle) {
  (void)guarded([&] {
    Endpoint* known = nullptr;
    // In a forked child it stays in the table: its threads are not there to be joined.
    if (Status status = find_endpoint(handle, known); !status.ok()) return status;
    endpoints().take(handle)->close();
    return Status{};
  });
}

mc_status caps(mc_handle handle, mc_caps* caps) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (caps == nullptr) return missing("caps");
    mc_caps ours{};
    ours.struct_size = caps->struct_size;
    ours.flags = MC_CAP_SAME_HOST_ONLY;
    ours.memory_kinds = 1u << MC_DRAM;
    ours.bandwidth_bytes_per_s =
        10'000'000'000;  // one core's memory copy; the engine measures what it really gets
    ours.latency_ns = 1'000;
    ours.alignment = 1;
    ours.inline_bytes = endpoint.options().inline_bytes;
    ours.in_flight_bytes = kInFlightBytes;
    ours.in_flight_ops = endpoint.options().queue_depth;
    std::memcpy(caps, &ours, std::min<size_t>(caps->struct_size, sizeof ours));
    return Status{};
  });
}

mc_status stats(mc_handle handle, mc_stats* stats) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (stats == nullptr) return missing("stats");
    mc_stats ours{};
    if (Status status = endpoint.stats(ours); !status.ok()) return status;
    ours.struct_size = stats->struct_size;
    std::memcpy(stats, &ours, std::min<size_t>(stats->struct_size, sizeof ours));
    return Status{};
  });
}

const char* last_error() { return last_reason().c_str(); }

mc_status export_address(mc_handle handle, void* blob, size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (blob == nullptr || length == nullptr) return missing("blob or length");
    return endpoint.export_address(blob, length);
  });
}

mc_status connect_peer(mc_handle handle, const void* address, size_t length, mc_handle* connection) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (address == nullptr || connection == nullptr) return missing("address or connection");
    return endpoint.connect(address, length, connection);
  });
}

void disconnect_peer(mc_handle handle, mc_handle connection) {
  (void)with_endpoint(handle, [&](Endpoint& endpoint) {
    endpoint.disconnect(connection);
    return Status{};
  });
}

mc_status register_memory(mc_handle handle, const mc_memory* memory, mc_handle* registered) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (memory == nullptr || registered == nullptr) return missing("memory or registered");
    return endpoint.register_memory(*memory, registered);
  });
}

mc_status deregister_memory(mc_handle handle, mc_handle registered, uint64_t deadline_ns) {
  return with_endpoint(
      handle, [&](Endpoint& endpoint) { return endpoint.deregister_memory(registered, deadline_ns); });
}

mc_status export_key(mc_handle handle, mc_handle registered, void*, size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (length == nullptr) return missing("length");
    return endpoint.export_key(registered, length);
  });
}

mc_status import_key(mc_handle handle, mc_handle connection, uint64_t region_id,
                     const uint8_t key[MC_KEY_BYTES], uint64_t, const void*, size_t, mc_handle* remote) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (key == nullptr || remote == nullptr) return missing("key or remote");
    return endpoint.import_key(connection, region_id, key, remote);
  });
}

void release_key(mc_handle handle, mc_handle remote) {
  (void)with_endpoint(handle, [&](Endpoint& endpoint) {
    endpoint.release_key(remote);
    return Status{};
  });
}

mc_status submit(mc_handle handle, const mc_op* ops, size_t count, size_t* accepted) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if ((ops == nullptr && count > 0) || accepted == nullptr) return missing("ops or accepted");
    return endpoint.submit(ops, count, accepted);
  });
}

mc_status poll(mc_handle handle, mc_completion* completions, size_t capacity, size_t* count) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if ((completions == nullptr && capacity > 0) || count == nullptr) return missing("completions or count");
    *count = endpoint.poll(completions, capacity);
    return Status{};
  });
}

int event_fd(mc_handle handle) {
  int fd = -1;
  (void)with_endpoint(handle, [&](Endpoint& endpoint) {
    fd = endpoint.event_fd();
    return Status{};
  });
  return fd;
}

mc_status arm(mc_handle handle) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    return endpoint.arm() ? Status{} : failed(MC_AGAIN, "poll: something has finished or waits to be copied");
  });
}

mc_status cancel(mc_handle handle, uint64_t cookie) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    endpoint.cancel(cookie);
    return Status{};
  });
}

mc_status grant(mc_handle handle, mc_handle registered, const uint8_t key[MC_KEY_BYTES], uint32_t access,
                void*, size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint) {
    if (key == nullptr || length == nullptr) return missing("key or length");
    return endpoint.grant(registered, key, access, length);
  });
}

mc_status revoke(mc_handle handle, mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  return with_endpoint(handle,
                       [&](Endpoint& endpoint) { return endpoint.revoke(registered, key, deadline_ns); });
}

}  // namespace

const mc_driver_v1* driver_table() {
  static const mc_driver_v1 table = {
      .abi_major = MC_ABI_MAJOR,
      .abi_minor = MC_ABI_MINOR,
      .struct_size = sizeof(mc_driver_v1),
      .name = "shm",
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
  };
  return &table;
}

}  // namespace mooncake::shm
