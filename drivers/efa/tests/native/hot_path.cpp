// The hot path alone, over a libfabric whose operations are over when they are posted, and move nothing:
// operations a second on one core, doorbells, and what is allocated on the way. hot_path.py preloads this and
// hands it the driver's table, so that it is the core as it was installed that is measured.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "mooncake_driver.h"
#include "support/os.hpp"

namespace {

std::atomic<uint64_t> allocations{0};
thread_local int in_the_double = 0;

void count_one() {
  if (in_the_double == 0) allocations.fetch_add(1, std::memory_order_relaxed);
}

}  // namespace

extern "C" void double_at_work(int more) { in_the_double += more; }

// The allocator of the whole process: what C++ allocates comes by here, too.
extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t count, size_t size);
void* __libc_realloc(void* made, size_t size);

void* malloc(size_t size) {
  count_one();
  return __libc_malloc(size);
}
void* calloc(size_t count, size_t size) {
  count_one();
  return __libc_calloc(count, size);
}
void* realloc(void* made, size_t size) {
  count_one();
  return __libc_realloc(made, size);
}
}

namespace {

using mooncake::driver::now_ns;

constexpr size_t kBatch = 1024;
constexpr size_t kBlock = 64;
constexpr size_t kStride = 128;  // a gap between blocks, so that none could be merged with its neighbour
constexpr size_t kWarmUp = 64 * kBatch;
constexpr int kRounds = 4;
constexpr uint64_t kDeadlineNs = 20'000'000'000;

const mc_driver_v1* table = nullptr;

void require(bool good, const char* what) {
  if (good) return;
  std::fprintf(stderr, "not so: %s (%s)\n", what, table->last_error());
  std::exit(1);
}

struct Side {
  Side(const std::string& library, uint64_t region) : memory(kBatch * kStride) {
    const mc_option options[] = {{"library", library.c_str()}, {"domain", "double0"}};
    require(table->open(options, 2, &endpoint) == MC_OK, "an endpoint opens");
    mc_memory what{};
    what.struct_size = sizeof what;
    what.fd = -1;
    what.address = reinterpret_cast<uint64_t>(memory.data());
    what.length = memory.size();
    what.region_id = region;
    require(table->register_memory(endpoint, &what, &local) == MC_OK, "memory is registered");
  }
  ~Side() { table->close(endpoint); }

  std::vector<uint8_t> memory;
  mc_handle endpoint = 0, local = 0;
};

class Bench {
 public:
  explicit Bench(const std::string& library)
      : source_(library, 1), target_(library, 2), ops_(kBatch), done_(kBatch) {
    uint8_t address[MC_BLOB_MAX];
    size_t length = sizeof address;
    require(table->export_address(target_.endpoint, address, &length) == MC_OK, "an address");
    require(table->connect(source_.endpoint, address, length, &connection_) == MC_OK, "a connection");
    const uint8_t key[MC_KEY_BYTES] = {};
    mc_handle remote = 0;
    require(table->import_key(source_.endpoint, connection_, 2, key, target_.memory.size(), nullptr, 0,
                              &remote) == MC_OK,
            "a remote region");
    for (size_t i = 0; i < kBatch; ++i)
      ops_[i] = {MC_WRITE, 0, connection_, source_.local, remote, i * kStride, i * kStride, kBlock, i};
    run(1);  // which greets the peer and asks for its region
    // Writes are counted from the first notice on, which costs a little more.
    require(table->notify(source_.endpoint, connection_, "first", 5, 0) == MC_OK, "a notice");
    for (uint64_t until = now_ns() + kDeadlineNs; poll() == 0;) require(now_ns() < until, "it is delivered");
  }

  // Batches, until `count` operations are done. A function of its own: callgrind counts what is in it.
  __attribute__((noinline)) void run(size_t count) {
    uint64_t until = now_ns() + kDeadlineNs;
    for (size_t done = 0, sent = 0; done < count;) {
      size_t accepted = 0;
      if (size_t wanted = std::min(kBatch, count - sent); wanted > 0) {
        mc_status status = table->submit(source_.endpoint, ops_.data(), wanted, &accepted);
        require(status == MC_OK || status == MC_AGAIN, "submit");
        sent += accepted;
      }
      size_t fetched = poll();
      done += fetched;
      if (fetched > 0) until = now_ns() + kDeadlineNs;
      require(now_ns() < until, "operations complete in time");
    }
  }

 private:
  size_t poll() {
    size_t count = 0;
    require(table->poll(source_.endpoint, done_.data(), done_.size(), &count) == MC_OK, "poll");
    for (size_t i = 0; i < count; ++i) require(done_[i].status == MC_OK, done_[i].reason);
    return count;
  }

  Side source_, target_;
  mc_handle connection_ = 0;
  std::vector<mc_op> ops_;
  std::vector<mc_completion> done_;
};

// Of all threads: the driver's own has a part in it.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// Operations for each second of the processor: the median of rounds.
double timed(Bench& bench, double seconds, uint64_t* total) {
  constexpr size_t kRound = 128 * kBatch;
  std::vector<double> rates;
  rates.reserve(10'000);
  for (uint64_t until = now_ns() + static_cast<uint64_t>(seconds * 1e9); now_ns() < until;) {
    double cpu = cpu_seconds();
    bench.run(kRound);
    rates.push_back(static_cast<double>(kRound) / (cpu_seconds() - cpu));
    *total += kRound;
  }
  require(!rates.empty(), "there is time for a round");
  std::sort(rates.begin(), rates.end());
  return rates[rates.size() / 2];
}

}  // namespace

struct HotPath {
  uint64_t operations, doorbells, allocations, allocations_before;
  double operations_per_cpu_s;
};

// For some seconds or, when it is not 0, a number of operations. Ends the program when something is wrong.
extern "C" void hot_path(const mc_driver_v1* driver, const char* library, double seconds, uint64_t operations,
                         HotPath* found) {
  table = driver;
  Bench bench(library);
  void* loaded = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  require(loaded != nullptr, "the double is loaded");
  auto finish_at_once = reinterpret_cast<void (*)(int)>(dlsym(loaded, "double_finish_at_once"));
  auto doorbells = reinterpret_cast<uint64_t (*)()>(dlsym(loaded, "double_doorbells"));
  finish_at_once(1);
  bench.run(kWarmUp);  // queues grow to their size
  // On a busy machine a thread that had to wait for its core may still find a queue longer than ever before.
  // What allocates by operation does so in every round.
  for (int round = 0; round < (operations > 0 ? kRounds : 1); ++round) {
    uint64_t rung = doorbells(), before = allocations;
    if (operations > 0) {
      bench.run(operations);
      found->operations = operations;
    } else {
      found->operations_per_cpu_s = timed(bench, seconds, &found->operations);
    }
    found->allocations_before = before;
    found->allocations = allocations - before;
    found->doorbells = doorbells() - rung;
    if (found->allocations == 0) break;
  }
  finish_at_once(0);
}
