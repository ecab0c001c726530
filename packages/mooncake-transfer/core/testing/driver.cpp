// What each function promises is written in mooncake_driver.h.
#include "driver.hpp"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <exception>
#include <thread>

#include "support/os.hpp"

namespace mooncake::fake {

namespace {

// What a peer needs to know. Only meaningful in the process that made it.
struct Address {
  uint32_t magic;
  int32_t process;
  uint64_t fabric;
  uint64_t endpoint;
  char device[64];
};

constexpr uint32_t kMagic = 0x46414b45;

template <typename Value>
struct Table {
  std::mutex mutex;
  std::map<uint64_t, Value> entries;

  Value find(uint64_t number) {
    std::lock_guard lock(mutex);
    auto found = entries.find(number);
    return found == entries.end() ? Value{} : found->second;
  }
};

struct OpenEndpoint {
  std::shared_ptr<Endpoint> endpoint;
  uint64_t fabric_number = 0;
  explicit operator bool() const { return endpoint != nullptr; }
};

auto& fabrics() { return driver::of_this_process<Table<std::weak_ptr<Fabric>>>(); }
auto& endpoints() { return driver::of_this_process<Table<OpenEndpoint>>(); }

struct Tables {
  std::mutex mutex;
  std::map<std::string, mc_driver_v1> by_name;
};

thread_local std::string last_reason;

mc_status report(Result result) {
  if (!result.ok()) last_reason = std::move(result.reason);
  return result.code;
}

// Runs a body and lets no exception cross the ABI.
mc_status guarded(auto&& body) noexcept {
  try {
    return report(body());
  } catch (const std::exception& error) {
    return report({MC_NO_MEMORY, error.what()});
  }
}

mc_status with_endpoint(mc_handle handle, auto&& body) noexcept {
  return guarded([&]() -> Result {
    OpenEndpoint open = endpoints().find(handle);
    if (!open) return {MC_INVALID, "no endpoint has this handle"};
    return body(*open.endpoint, *open.endpoint->fabric);
  });
}

Result set_option(Settings& settings, uint64_t& fabric, const mc_option& option) {
  std::string name = option.name;
  uint64_t number = std::strtoull(option.value, nullptr, 10);
  if (name == "device") {
    settings.device = option.value;
  } else if (name == "fabric") {
    fabric = number;
  } else if (name == "memory_kinds") {
    settings.caps.memory_kinds = number;
  } else if (name == "flags") {
    settings.caps.flags = static_cast<uint32_t>(number);
  } else if (name == "bandwidth_bytes_per_s") {
    settings.caps.bandwidth_bytes_per_s = number;
  } else if (name == "latency_ns") {
    settings.caps.latency_ns = number;
  } else if (name == "max_op_bytes") {
    settings.caps.max_op_bytes = number;
  } else if (name == "alignment") {
    settings.caps.alignment = static_cast<uint32_t>(number);
  } else if (name == "inline_bytes") {
    settings.caps.inline_bytes = number;
  } else if (name == "in_flight_bytes") {
    settings.caps.in_flight_bytes = number;
  } else if (name == "in_flight_ops") {
    settings.caps.in_flight_ops = number;
  } else if (name == "queue_ops") {
    settings.queue_ops = number;
  } else if (name == "notice_bytes") {
    settings.caps.notice_bytes = number;
  } else if (name == "notice_room") {
    settings.notice_room = number;
  } else if (name == "cuda_is_host") {
    settings.cuda_is_host = number != 0;
  } else if (name == "connect_ms") {
    settings.connect_ms = number;
  } else if (name == "register_ms") {
    settings.register_ms = number;
  } else if (name == "has_event_fd") {
    settings.has_event_fd = number != 0;
  } else {
    return {MC_INVALID, "unknown option " + name};
  }
  return {};
}

mc_status open_endpoint(const mc_option* options, size_t count, mc_handle* handle) {
  return guarded([&]() -> Result {
    Settings settings;
    settings.caps.memory_kinds = 1u << MC_DRAM;
    settings.caps.bandwidth_bytes_per_s = 1'000'000'000;
    settings.caps.latency_ns = 10'000;
    settings.caps.alignment = 1;
    uint64_t number = 0;
    for (size_t i = 0; i < count; ++i) {
      if (Result result = set_option(settings, number, options[i]); !result.ok()) return result;
    }
    std::shared_ptr<Fabric> fabric = fabrics().find(number).lock();
    if (!fabric) return {MC_INVALID, "there is no fake fabric " + std::to_string(number)};
    if (settings.device.empty() || settings.device.size() >= sizeof Address::device) {
      return {MC_INVALID, "a device needs a name of 1 to 63 characters"};
    }
    OpenEndpoint open{nullptr, number};
    if (Result result = fabric->open(settings, &open.endpoint); !result.ok()) return result;
    *handle = open.endpoint->number;
    std::lock_guard lock(endpoints().mutex);
    endpoints().entries[*handle] = std::move(open);
    return {};
  });
}

void close_endpoint(mc_handle handle) {
  OpenEndpoint open = endpoints().find(handle);
  if (!open) return;
  open.endpoint->fabric->close(*open.endpoint);
  std::lock_guard lock(endpoints().mutex);
  endpoints().entries.erase(handle);
}

mc_status caps(mc_handle handle, mc_caps* out) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric&) -> Result {
    mc_caps ours = endpoint.settings.caps;
    ours.struct_size = out->struct_size;
    std::memcpy(out, &ours, std::min<size_t>(out->struct_size, sizeof ours));
    return {};
  });
}

mc_status stats(mc_handle handle, mc_stats* out) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) -> Result {
    mc_stats ours = fabric.stats(endpoint);
    ours.struct_size = out->struct_size;
    std::memcpy(out, &ours, std::min<size_t>(out->struct_size, sizeof ours));
    return {};
  });
}

const char* last_error() { return last_reason.c_str(); }

mc_status export_address(mc_handle handle, void* blob, size_t* length) {
  return guarded([&]() -> Result {
    OpenEndpoint open = endpoints().find(handle);
    if (!open) return {MC_INVALID, "no endpoint has this handle"};
    Address address{kMagic, getpid(), open.fabric_number, handle, {}};
    open.endpoint->settings.device.copy(address.device, sizeof address.device - 1);
    if (*length < sizeof address) return {MC_INVALID, "there is no room for the address"};
    std::memcpy(blob, &address, sizeof address);
    *length = sizeof address;
    return {};
  });
}

mc_status connect_peer(mc_handle handle, const void* blob, size_t length, mc_handle* connection) {
  return guarded([&]() -> Result {
    OpenEndpoint open = endpoints().find(handle);
    if (!open) return {MC_INVALID, "no endpoint has this handle"};
    Address address;
    if (length != sizeof address) return {MC_INVALID, "not an address of the fake driver"};
    std::memcpy(&address, blob, sizeof address);
    if (address.magic != kMagic || memchr(address.device, 0, sizeof address.device) == nullptr) {
      return {MC_INVALID, "not an address of the fake driver"};
    }
    if (address.process != getpid() || address.fabric != open.fabric_number) {
      return {MC_UNREACHABLE, "the fake driver reaches peers of the same process and fabric only"};
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(open.endpoint->settings.connect_ms));
    return open.endpoint->fabric->connect(*open.endpoint, address.endpoint, address.device, connection);
  });
}

void disconnect_peer(mc_handle handle, mc_handle connection) {
  with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) -> Result {
    fabric.disconnect(endpoint, connection);
    return {};
  });
}

mc_status register_memory(mc_handle handle, const mc_memory* memory, mc_handle* registered) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) {
    std::this_thread::sleep_for(std::chrono::milliseconds(endpoint.settings.register_ms));
    return fabric.add_memory(endpoint, *memory, registered);
  });
}

mc_status deregister_memory(mc_handle handle, mc_handle registered, uint64_t deadline_ns) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) {
    return fabric.remove_memory(endpoint, registered, deadline_ns);
  });
}

mc_status export_key(mc_handle handle, mc_handle registered, void*, size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) -> Result {
    if (!fabric.has_memory(endpoint, registered)) return {MC_INVALID, "no memory has this handle"};
    *length = 0;
    return {};
  });
}

mc_status import_key(mc_handle handle, mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t,
                     const void*, size_t, mc_handle* remote) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) {
    Remote named{connection, region_id, {}};
    std::memcpy(named.key, key, sizeof named.key);
    return fabric.import_key(endpoint, named, remote);
  });
}

void release_key(mc_handle handle, mc_handle remote) {
  with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) -> Result {
    fabric.release_key(endpoint, remote);
    return {};
  });
}

mc_status submit_on_stream(mc_handle handle, void* stream, const mc_op* ops, size_t count, size_t* accepted) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) {
    return fabric.submit(endpoint, reinterpret_cast<uint64_t>(stream), ops, count, accepted);
  });
}

mc_status submit(mc_handle handle, const mc_op* ops, size_t count, size_t* accepted) {
  return submit_on_stream(handle, nullptr, ops, count, accepted);
}

mc_status poll(mc_handle handle, mc_completion* completions, size_t capacity, size_t* count) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric&) -> Result {
    *count = endpoint.completions.poll(completions, capacity);
    return {};
  });
}

int event_fd(mc_handle handle) {
  OpenEndpoint open = endpoints().find(handle);
  return open && open.endpoint->settings.has_event_fd ? open.endpoint->completions.event_fd() : -1;
}

mc_status arm(mc_handle handle) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric&) -> Result {
    if (!endpoint.completions.arm()) return {MC_AGAIN, "completions are waiting"};
    return {};
  });
}

mc_status cancel(mc_handle handle, uint64_t cookie) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) -> Result {
    fabric.cancel(endpoint, cookie);
    return {};
  });
}

mc_status notify(mc_handle handle, mc_handle connection, const void* data, size_t length, uint64_t cookie) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) {
    return fabric.notify(endpoint, connection, {static_cast<const char*>(data), length}, cookie);
  });
}

mc_status poll_notices(mc_handle handle, mc_notice* notices, size_t capacity, size_t* count) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric&) -> Result {
    *count = endpoint.completions.poll_notices(notices, capacity);
    return {};
  });
}

mc_status grant(mc_handle handle, mc_handle registered, const uint8_t* key, uint32_t access, void*,
                size_t* length) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) {
    Result granted = fabric.grant(endpoint, registered, key, access);
    if (granted.ok()) *length = 0;
    return granted;
  });
}

mc_status revoke(mc_handle handle, mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
  return with_endpoint(handle, [&](Endpoint& endpoint, Fabric& fabric) {
    return fabric.revoke(endpoint, registered, key, deadline_ns);
  });
}

}  // namespace

const mc_driver_v1* driver_table(const std::string& name) {
  auto& [mutex, tables] = driver::of_this_process<Tables>();
  std::lock_guard lock(mutex);
  auto [entry, is_new] = tables.try_emplace(name);
  if (is_new) {
    entry->second = {
        .abi_major = MC_ABI_MAJOR,
        .abi_minor = MC_ABI_MINOR,
        .struct_size = sizeof(mc_driver_v1),
        .name = entry->first.c_str(),
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
        .submit_on_stream = submit_on_stream,
        .late_writes = nullptr,  // an operation that ended moves nothing
        .fence = nullptr,
        .notify = notify,
        .poll_notices = poll_notices,
    };
  }
  return &entry->second;
}

std::shared_ptr<Fabric> make_fabric(uint64_t seed, bool manual_clock, uint64_t* number) {
  auto fabric = std::make_shared<Fabric>(seed, manual_clock);
  *number = new_number();
  std::lock_guard lock(fabrics().mutex);
  std::erase_if(fabrics().entries, [](const auto& entry) { return entry.second.expired(); });
  fabrics().entries[*number] = fabric;
  return fabric;
}

}  // namespace mooncake::fake
