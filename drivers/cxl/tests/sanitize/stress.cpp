// The driver's core under a sanitizer, without Python: threads that read, write, cancel, revoke and connect
// at the same time, between two endpoints of one process. Ends with 0 when every operation completed exactly
// once, every byte was where it belongs, and the sanitizer has nothing to say.
//
//   cxl_stress [seconds]   (`./dev sanitize` builds and runs it)
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "abi.hpp"
#include "options.hpp"
#include "pool.hpp"

namespace {

constexpr size_t kBytes = 4 << 20;
constexpr unsigned kCallers = 3;
constexpr size_t kShare = kBytes / kCallers;  // of the region, for each: all of them see the same mapping
constexpr uint64_t kRegion = 7;
const uint8_t kKey[MC_KEY_BYTES] = {1, 2, 3};
const mc_driver_v1* const table = mooncake::cxl::driver_table();
std::atomic<uint64_t> completed{0};
std::mutex key_mutex;  // what the owner last told of its region
uint8_t key_blob[MC_BLOB_MAX];
size_t key_bytes = 0;

void require(bool so, const char* what) {
  if (so) return;
  std::fprintf(stderr, "not so: %s (%s)\n", what, table->last_error());
  std::abort();
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
}

// The pool of the run: a file without a name, which every endpoint opens by its descriptor.
std::string& path() {
  static std::string text;
  return text;
}

std::shared_ptr<mooncake::cxl::Pool> open_pool() {
  mooncake::cxl::PoolRequest request;
  request.backing.path = path();
  std::shared_ptr<mooncake::cxl::Pool> pool;
  mooncake::cxl::Status status = mooncake::cxl::Pool::open(request, pool);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.reason.c_str());
  require(status.ok(), "the pool opens");
  return pool;
}

// A block of the pool.
struct Memory {
  Memory() : pool(open_pool()) {
    require(pool->allocate(kBytes, "", false, &view).ok(), "a block of the pool");
    bytes = reinterpret_cast<uint8_t*>(pool->data() + view.offset);
  }
  ~Memory() { pool->release(view.index); }
  std::shared_ptr<mooncake::cxl::Pool> pool;
  mooncake::cxl::Pool::BlockView view{};
  uint8_t* bytes;
};

mc_handle enroll(mc_handle endpoint, const Memory& memory, uint64_t id) {
  mc_memory what{};
  what.struct_size = sizeof what;
  what.kind = MC_DRAM;
  what.fd = -1;
  what.address = reinterpret_cast<uint64_t>(memory.bytes);
  what.length = kBytes;
  what.region_id = id;
  std::memcpy(what.key, kKey, sizeof kKey);
  mc_handle handle = 0;
  require(table->register_memory(endpoint, &what, &handle) == MC_OK, "memory is registered");
  return handle;
}

// One thread of an initiator: its own endpoint, so that it knows what it may expect of poll().
class Caller {
 public:
  Caller(const std::vector<uint8_t>& address, unsigned seed)
      : address_(address), seed_(seed), share_((seed - 1) * kShare) {
    mc_option options[] = {
        {"path", path().c_str()}, {"inline_bytes", "65536"}, {"chunk_bytes", "65536"}, {"workers", "2"}};
    require(table->open(options, 4, &endpoint_) == MC_OK, "an endpoint opens");
    local_ = enroll(endpoint_, memory_, seed);
    connect();
  }
  ~Caller() {
    table->disconnect(endpoint_, connection_);
    table->close(endpoint_);
  }

  // Submits a batch, cancels some of it, and waits for all of it.
  void round() {
    // Each operation has a part of the memory of its own: two at the same place would be a race of ours.
    bool large = rand_r(&seed_) % 8 == 0;
    std::vector<mc_op> ops(large ? 1 : 1 + rand_r(&seed_) % 40);
    uint64_t part = kShare / ops.size();
    for (size_t i = 0; i < ops.size(); ++i) ops[i] = random_op(i * part, large ? part : 5000);
    size_t accepted = 0;
    mc_status status = table->submit(endpoint_, ops.data(), ops.size(), &accepted);
    require(status == MC_OK || status == MC_AGAIN, "operations are submitted");
    if (rand_r(&seed_) % 4 == 0) table->cancel(endpoint_, next_cookie_ - 1);
    if (rand_r(&seed_) % 64 == 0) {
      table->disconnect(endpoint_, connection_);
      connect();
    }
    uint64_t deadline = now_ns() + 30'000'000'000ull;
    for (size_t done = 0; done < accepted; done += fetch()) require(now_ns() < deadline, "all complete");
    next_cookie_ = 1;
  }

 private:
  void connect() {
    require(table->connect(endpoint_, address_.data(), address_.size(), &connection_) == MC_OK,
            "a connection");
    std::lock_guard lock(key_mutex);
    require(table->import_key(endpoint_, connection_, kRegion, kKey, kBytes, key_blob, key_bytes, &remote_) ==
                MC_OK,
            "a remote region");
  }

  mc_op random_op(uint64_t from, uint64_t most) {
    uint64_t length = 1 + static_cast<uint64_t>(rand_r(&seed_)) % most;
    uint64_t at = from + static_cast<uint64_t>(rand_r(&seed_)) % (most - length + 1);
    uint32_t opcode = rand_r(&seed_) % 2 == 0 ? MC_READ : MC_WRITE;
    return {opcode, 0, connection_, local_, remote_, at, share_ + at, length, next_cookie_++};
  }

  size_t fetch() {
    mc_completion out[16];
    size_t count = 0;
    require(table->poll(endpoint_, out, 16, &count) == MC_OK, "poll");
    for (size_t i = 0; i < count; ++i) {
      bool known = out[i].status == MC_OK || out[i].status == MC_CANCELLED || out[i].status == MC_CLOSED ||
                   out[i].status == MC_REFUSED || out[i].status == MC_UNREACHABLE;
      if (!known) std::fprintf(stderr, "%d: %s\n", out[i].status, out[i].reason);
      require(known, "a completion has a known status");
    }
    if (count == 0 && table->arm(endpoint_) == MC_OK) std::this_thread::yield();
    completed += count;
    return count;
  }

  const std::vector<uint8_t>& address_;
  Memory memory_;
  unsigned seed_;
  const uint64_t share_;
  mc_handle endpoint_ = 0, local_ = 0, connection_ = 0, remote_ = 0;
  uint64_t next_cookie_ = 1;
};

void export_to_callers(mc_handle endpoint, mc_handle region) {
  std::lock_guard lock(key_mutex);
  key_bytes = sizeof key_blob;
  require(table->export_key(endpoint, region, key_blob, &key_bytes) == MC_OK, "a key is exported");
}

// Registers, grants, revokes and takes back a region over and over while others use it.
void own(mc_handle endpoint, uint64_t until_ns) {
  for (uint8_t round = 0; now_ns() < until_ns; ++round) {
    Memory memory;
    mc_handle region = enroll(endpoint, memory, kRegion);
    export_to_callers(endpoint, region);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    uint8_t key[MC_KEY_BYTES] = {9, round};
    uint8_t blob[MC_BLOB_MAX];
    size_t length = sizeof blob;
    require(table->grant(endpoint, region, key, MC_ACCESS_READ, blob, &length) == MC_OK, "a key is granted");
    require(table->revoke(endpoint, region, round % 2 == 0 ? key : nullptr, 0) == MC_OK, "a key is revoked");
    require(table->deregister_memory(endpoint, region, now_ns() + 10'000'000'000ull) == MC_OK,
            "the region is given back");
    // Nobody may touch it any more: this would be a race, and the bytes would change.
    std::memset(memory.bytes, round, kBytes);
    for (size_t i = 0; i < kBytes; i += 97) require(memory.bytes[i] == round, "bytes stay as they were left");
  }
}

}  // namespace

int main(int count, char** arguments) {
  uint64_t until_ns = now_ns() + static_cast<uint64_t>((count > 1 ? std::atof(arguments[1]) : 10.0) * 1e9);
  int file = memfd_create("pool", MFD_CLOEXEC);
  require(file >= 0 && ftruncate(file, 128 << 20) == 0, "a file for the pool");
  path() = "/proc/self/fd/" + std::to_string(file);
  mc_option options[] = {{"path", path().c_str()}, {"create", "true"}};
  mc_handle owner = 0;
  require(table->open(options, 2, &owner) == MC_OK, "the owner's endpoint opens");
  {
    Memory first;
    mc_handle region = enroll(owner, first, kRegion);
    export_to_callers(owner, region);
    require(table->deregister_memory(owner, region, now_ns() + 10'000'000'000ull) == MC_OK, "given back");
  }
  std::vector<uint8_t> address(MC_BLOB_MAX);
  size_t length = address.size();
  require(table->export_address(owner, address.data(), &length) == MC_OK, "the address is exported");
  address.resize(length);
  std::vector<std::thread> threads;
  for (unsigned seed = 1; seed <= kCallers; ++seed) {
    threads.emplace_back([&, seed] {
      while (now_ns() < until_ns) {
        Caller caller(address, seed);
        for (int i = 0; i < 50 && now_ns() < until_ns; ++i) caller.round();
      }
    });
  }
  own(owner, until_ns);
  for (std::thread& thread : threads) thread.join();
  table->close(owner);
  std::printf("%llu operations\n", static_cast<unsigned long long>(completed.load()));
  return completed.load() > 0 ? 0 : 1;
}
