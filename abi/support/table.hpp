// Makes the C function table of a driver from a C++ class, so that a driver has no other code about the ABI.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>

#include "calls.hpp"
#include "mooncake_driver.h"
#include "status.hpp"

namespace mooncake::driver {

// `Endpoint` has a static open(options, count, &shared_ptr), close(), and a method for each
// function of mc_driver_v1, whose promises it keeps: the same parameters without the endpoint's handle,
// references for what is not null, a Status for an mc_status (poll: how many; arm: whether nothing waits).
// What it leaves out of the later minors is null in the table.
template <class Endpoint>
class Table : private Calls<Endpoint> {
 public:
  static const mc_driver_v1* make(const char* name) {
    static const mc_driver_v1 table = describe(name);
    return &table;
  }

 private:
  using Calls<Endpoint>::endpoints;
  using Calls<Endpoint>::find;
  using Calls<Endpoint>::guarded;
  using Calls<Endpoint>::last_reason;
  using Calls<Endpoint>::missing;
  using Calls<Endpoint>::with;

  static mc_status open(const mc_option* options, size_t count, mc_handle* endpoint) {
    return guarded([&] {
      if (endpoint == nullptr) return missing("endpoint");
      std::shared_ptr<Endpoint> made;
      if (Status status = Endpoint::open(options, count, made); !status.ok()) return status;
      return endpoints().add(std::move(made), endpoint);
    });
  }

  static void close(mc_handle handle) {
    (void)guarded([&] {
      Endpoint* known = nullptr;
      // A forked child finds none of its parent's: their threads are not there to be joined.
      if (Status status = find(handle, known); !status.ok()) return status;
      endpoints().take(handle)->close();
      return Status{};
    });
  }

  static mc_status caps(mc_handle handle, mc_caps* caps) {
    return with(handle, [&](Endpoint& endpoint) {
      if (caps == nullptr) return missing("caps");
      mc_caps ours{};
      ours.alignment = 1;
      if (Status status = endpoint.caps(ours); !status.ok()) return status;
      ours.struct_size = caps->struct_size;
      std::memcpy(caps, &ours, std::min<size_t>(caps->struct_size, sizeof ours));
      return Status{};
    });
  }

  static mc_status stats(mc_handle handle, mc_stats* stats) {
    return with(handle, [&](Endpoint& endpoint) {
      if (stats == nullptr) return missing("stats");
      mc_stats ours{};
      if (Status status = endpoint.stats(ours); !status.ok()) return status;
      ours.struct_size = stats->struct_size;
      std::memcpy(stats, &ours, std::min<size_t>(stats->struct_size, sizeof ours));
      return Status{};
    });
  }

  static const char* last_error() { return last_reason().c_str(); }

  static mc_status export_address(mc_handle handle, void* blob, size_t* length) {
    return with(handle, [&](Endpoint& endpoint) {
      if (blob == nullptr || length == nullptr) return missing("blob or length");
      return endpoint.export_address(blob, length);
    });
  }

  static mc_status connect(mc_handle handle, const void* address, size_t length, mc_handle* connection) {
    return with(handle, [&](Endpoint& endpoint) {
      if (address == nullptr || connection == nullptr) return missing("address or connection");
      return endpoint.connect(address, length, connection);
    });
  }

  static void disconnect(mc_handle handle, mc_handle connection) {
    (void)with(handle, [&](Endpoint& endpoint) {
      endpoint.disconnect(connection);
      return Status{};
    });
  }

  static mc_status register_memory(mc_handle handle, const mc_memory* memory, mc_handle* registered) {
    return with(handle, [&](Endpoint& endpoint) {
      if (memory == nullptr || registered == nullptr) return missing("memory or registered");
      return endpoint.register_memory(*memory, registered);
    });
  }

  static mc_status deregister_memory(mc_handle handle, mc_handle registered, uint64_t deadline_ns) {
    return with(handle,
                [&](Endpoint& endpoint) { return endpoint.deregister_memory(registered, deadline_ns); });
  }

  static mc_status export_key(mc_handle handle, mc_handle registered, void* blob, size_t* length) {
    return with(handle, [&](Endpoint& endpoint) {
      if (blob == nullptr || length == nullptr) return missing("blob or length");
      return endpoint.export_key(registered, blob, length);
    });
  }

  static mc_status import_key(mc_handle handle, mc_handle connection, uint64_t region_id,
                              const uint8_t key[MC_KEY_BYTES], uint64_t region_length, const void* blob,
                              size_t length, mc_handle* remote) {
    return with(handle, [&](Endpoint& endpoint) {
      if (key == nullptr || remote == nullptr) return missing("key or remote");
      if (blob == nullptr && length != 0) return missing("blob");
      return endpoint.import_key(connection, region_id, key, region_length, blob, length, remote);
    });
  }

  static void release_key(mc_handle handle, mc_handle remote) {
    (void)with(handle, [&](Endpoint& endpoint) {
      endpoint.release_key(remote);
      return Status{};
    });
  }

  static mc_status submit(mc_handle handle, const mc_op* ops, size_t count, size_t* accepted) {
    return with(handle, [&](Endpoint& endpoint) {
      if ((ops == nullptr && count > 0) || accepted == nullptr) return missing("ops or accepted");
      return endpoint.submit(ops, count, accepted);
    });
  }

  static mc_status poll(mc_handle handle, mc_completion* completions, size_t capacity, size_t* count) {
    return with(handle, [&](Endpoint& endpoint) {
      if ((completions == nullptr && capacity > 0) || count == nullptr)
        return missing("completions or count");
      *count = endpoint.poll(completions, capacity);
      return Status{};
    });
  }

  static int event_fd(mc_handle handle) {
    int fd = -1;
    (void)with(handle, [&](Endpoint& endpoint) {
      fd = endpoint.event_fd();
      return Status{};
    });
    return fd;
  }

  static mc_status arm(mc_handle handle) {
    return with(handle, [&](Endpoint& endpoint) {
      return endpoint.arm() ? Status{} : failed(MC_AGAIN, "poll first");
    });
  }

  static mc_status cancel(mc_handle handle, uint64_t cookie) {
    return with(handle, [&](Endpoint& endpoint) {
      endpoint.cancel(cookie);
      return Status{};
    });
  }

  static mc_status grant(mc_handle handle, mc_handle registered, const uint8_t key[MC_KEY_BYTES],
                         uint32_t access, void* blob, size_t* length) {
    return with(handle, [&](Endpoint& endpoint) {
      if (key == nullptr || length == nullptr) return missing("key or length");
      return endpoint.grant(registered, key, access, blob, length);
    });
  }

  static mc_status revoke(mc_handle handle, mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
    return with(handle, [&](Endpoint& endpoint) { return endpoint.revoke(registered, key, deadline_ns); });
  }

  static mc_status submit_on_stream(mc_handle handle, void* stream, const mc_op* ops, size_t count,
                                    size_t* accepted) {
    return with(handle, [&](Endpoint& endpoint) {
      if ((ops == nullptr && count > 0) || accepted == nullptr) return missing("ops or accepted");
      return endpoint.submit_on_stream(stream, ops, count, accepted);
    });
  }

  static mc_status late_writes(mc_handle handle, mc_handle connection, void* token, size_t* length) {
    return with(handle, [&](Endpoint& endpoint) {
      if (token == nullptr || length == nullptr) return missing("token or length");
      return endpoint.late_writes(connection, token, length);
    });
  }

  static mc_status fence(mc_handle handle, const void* token, size_t length, uint64_t deadline_ns) {
    return with(handle, [&](Endpoint& endpoint) {
      if (token == nullptr) return missing("token");
      return endpoint.fence(token, length, deadline_ns);
    });
  }

  static mc_status notify(mc_handle handle, mc_handle connection, const void* data, size_t length,
                          uint64_t cookie) {
    return with(handle, [&](Endpoint& endpoint) {
      if (data == nullptr || length == 0) return missing("data");
      return endpoint.notify(connection, data, length, cookie);
    });
  }

  static mc_status poll_notices(mc_handle handle, mc_notice* notices, size_t capacity, size_t* count) {
    return with(handle, [&](Endpoint& endpoint) {
      if ((notices == nullptr && capacity > 0) || count == nullptr) return missing("notices or count");
      *count = endpoint.poll_notices(notices, capacity);
      return Status{};
    });
  }

  static mc_driver_v1 describe(const char* name) {
    mc_driver_v1 table{};
    table.abi_major = MC_ABI_MAJOR;
    table.abi_minor = MC_ABI_MINOR;
    table.struct_size = sizeof table;
    table.name = name;
    table.open = open;
    table.close = close;
    table.caps = caps;
    table.stats = stats;
    table.last_error = last_error;
    table.export_address = export_address;
    table.connect = connect;
    table.disconnect = disconnect;
    table.register_memory = register_memory;
    table.deregister_memory = deregister_memory;
    table.export_key = export_key;
    table.import_key = import_key;
    table.release_key = release_key;
    table.submit = submit;
    table.poll = poll;
    table.event_fd = event_fd;
    table.arm = arm;
    table.cancel = cancel;
    if constexpr (requires(Endpoint& endpoint) { &Endpoint::grant; }) {
      table.grant = grant;
      table.revoke = revoke;
    }
    if constexpr (requires(Endpoint& endpoint) { &Endpoint::submit_on_stream; })
      table.submit_on_stream = submit_on_stream;
    if constexpr (requires(Endpoint& endpoint) { &Endpoint::late_writes; }) {
      table.late_writes = late_writes;
      table.fence = fence;
    }
    if constexpr (requires(Endpoint& endpoint) { &Endpoint::poll_notices; }) {
      table.notify = notify;
      table.poll_notices = poll_notices;
    }
    return table;
  }
};

}  // namespace mooncake::driver
