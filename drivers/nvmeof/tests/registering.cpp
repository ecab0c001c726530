// Through the driver's C table: a registration that fails half-way leaves nothing behind.
#include <fcntl.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <vector>

#include "mooncake_driver.h"
#include "support/os.hpp"

namespace {

using mooncake::driver::now_ns;

constexpr uint64_t kDeadlineNs = 30'000'000'000;
constexpr uint64_t kFile = 5, kMemory = 6;
std::string said;

struct Run {
  const mc_driver_v1* table;
  mc_handle endpoint = 0, connection = 0;

  bool require(bool good, const char* what) const {
    if (!good && said.empty()) said = std::string(what) + " (" + table->last_error() + ")";
    return good;
  }
  mc_status add(uint64_t id, uint32_t kind, int fd, void* at, uint64_t length, mc_handle* made) const {
    mc_memory memory{};
    memory.struct_size = sizeof memory;
    memory.kind = kind;
    memory.fd = fd;
    memory.address = reinterpret_cast<uint64_t>(at);
    memory.length = length;
    memory.region_id = id;
    memory.key[0] = 7;
    return table->register_memory(endpoint, &memory, made);
  }
  // Writes all of the memory to what now has the file's id.
  bool submit(mc_handle local, uint64_t length, uint64_t cookie) const {
    uint8_t key[MC_KEY_BYTES] = {7}, kind = MC_FILE;
    mc_handle remote = 0;
    size_t accepted = 0;
    bool named = table->import_key(endpoint, connection, kFile, key, length, &kind, 1, &remote) == MC_OK;
    mc_op op{MC_WRITE, 0, connection, local, remote, 0, 0, length, cookie};
    return require(named && table->submit(endpoint, &op, 1, &accepted) == MC_OK, "a write begins");
  }
  mc_completion wait() const {
    mc_completion done{};
    size_t count = 0;
    for (uint64_t until = now_ns() + kDeadlineNs; count == 0;) {
      if (!require(now_ns() < until, "it completes in time")) break;
      table->poll(endpoint, &done, 1, &count);
    }
    return done;
  }
};

void check(Run& run, const char* busy_path, const char* other_path, uint64_t length) {
  mc_option options[] = {{"io", "threads"}};
  uint8_t address[MC_BLOB_MAX];
  size_t size = sizeof address;
  bool open = run.table->open(options, 1, &run.endpoint) == MC_OK &&
              run.table->export_address(run.endpoint, address, &size) == MC_OK &&
              run.table->connect(run.endpoint, address, size, &run.connection) == MC_OK;
  if (!run.require(open, "an endpoint opens")) return;
  int busy_fd = ::open(busy_path, O_RDWR), other_fd = ::open(other_path, O_RDWR);
  std::vector<char> bytes(length, 'x');
  mc_handle local = 0, busy = 0, other = 0;
  bool there = run.add(kMemory, MC_DRAM, -1, bytes.data(), length, &local) == MC_OK &&
               run.add(kFile, MC_FILE, busy_fd, nullptr, length, &busy) == MC_OK;
  if (!run.require(there, "memory and a file are registered") || !run.submit(local, length, 1)) return;
  // Still moving: the region is not given back, and its id stays taken for peers of other processes.
  run.require(run.table->deregister_memory(run.endpoint, busy, 0) == MC_TIMEOUT, "the file is busy");
  run.require(run.add(kFile, MC_FILE, other_fd, nullptr, length, &other) == MC_INVALID, "the id is taken");
  if (!run.submit(local, length, 2)) return;
  for (int i = 0; i < 2; ++i) {
    mc_completion done = run.wait();
    run.require(done.status == (done.cookie == 1 ? MC_OK : MC_REFUSED), "nobody is served what was refused");
  }
  mc_status given_back = run.table->deregister_memory(run.endpoint, busy, now_ns() + kDeadlineNs);
  run.require(given_back == MC_OK, "later the file is given back");
  bool again = run.add(kFile, MC_FILE, other_fd, nullptr, length, &other) == MC_OK;
  run.require(again, "and its id is free");
  ::close(busy_fd);
  ::close(other_fd);
}

}  // namespace

// Empty, or what was not so.
extern "C" __attribute__((visibility("default"))) const char* check_registering(const void* table,
                                                                                const char* busy,
                                                                                const char* other,
                                                                                uint64_t length) {
  Run run{static_cast<const mc_driver_v1*>(table)};
  check(run, busy, other, length);
  run.table->close(run.endpoint);
  return said.c_str();
}
