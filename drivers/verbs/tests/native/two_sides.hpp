// Two endpoints of the driver in one process, driven through the C table as the engine does it.
#pragma once

#include <poll.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "abi.hpp"
#include "support/os.hpp"

namespace checks {

using mooncake::driver::now_ns;

constexpr uint64_t kDeadlineNs = 20'000'000'000;
inline const mc_driver_v1* table = mooncake::verbs::driver_table();

inline void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "not so: %s (%s)\n", what, table->last_error());
  std::exit(1);
}

using Options = std::vector<std::pair<std::string, std::string>>;

class Side {
 public:
  Side(const Options& options, size_t bytes, uint64_t id) : memory(bytes) {
    std::vector<mc_option> plain;
    for (const auto& [name, value] : options) plain.push_back({name.c_str(), value.c_str()});
    require(table->open(plain.data(), plain.size(), &endpoint) == MC_OK, "an endpoint opens");
    mc_memory what{};
    what.struct_size = sizeof what;
    what.fd = -1;
    what.address = reinterpret_cast<uint64_t>(memory.data());
    what.length = bytes;
    what.region_id = id;
    what.key[0] = 7;
    require(table->register_memory(endpoint, &what, &region) == MC_OK, "memory is registered");
    uint8_t blob[MC_BLOB_MAX];
    size_t length = sizeof blob;
    require(table->export_key(endpoint, region, blob, &length) == MC_OK, "its key is exported");
  }
  ~Side() { table->close(endpoint); }

  // Connects to another side and names its memory.
  void meet(const Side& other, uint64_t id) {
    uint8_t address[MC_BLOB_MAX];
    size_t length = sizeof address;
    require(table->export_address(other.endpoint, address, &length) == MC_OK, "an address");
    require(table->connect(endpoint, address, length, &connection) == MC_OK, "a connection");
    remote = name(id, other.memory.size());
  }
  // A region of the side that it is connected to.
  mc_handle name(uint64_t id, uint64_t length) {
    const uint8_t key[MC_KEY_BYTES] = {7};
    mc_handle named = 0;
    require(table->import_key(endpoint, connection, id, key, length, nullptr, 0, &named) == MC_OK,
            "a remote region");
    return named;
  }
  mc_op op(uint32_t opcode, uint64_t offset, uint64_t length, uint64_t cookie) const {
    return {opcode, 0, connection, region, remote, offset, offset, length, cookie};
  }
  void submit(const mc_op& op) {
    size_t accepted = 0;
    require(table->submit(endpoint, &op, 1, &accepted) == MC_OK && accepted == 1, "an operation is accepted");
  }
  // The next completion.
  mc_completion wait() {
    mc_completion done{};
    size_t count = 0;
    for (uint64_t until = now_ns() + kDeadlineNs; count == 0;) {
      require(now_ns() < until, "a completion comes in time");
      require(table->poll(endpoint, &done, 1, &count) == MC_OK, "poll");
      if (count == 0) sleep_until_event();
    }
    return done;
  }
  void sleep_until_event() {
    if (table->arm(endpoint) != MC_OK) return;
    pollfd watched{table->event_fd(endpoint), POLLIN, 0};
    require(::poll(&watched, 1, kDeadlineNs / 1'000'000) == 1, "an event tells of what there is");
  }

  std::vector<uint8_t> memory;
  mc_handle endpoint = 0, region = 0, connection = 0, remote = 0;
};

}  // namespace checks
