// The hot path alone, on a device that completes at once and moves nothing: operations a second on one core,
// doorbells, and what is allocated on the way. `hot_path LIBRARY SECONDS [OPERATIONS]` prints JSON; with a
// number of operations it does so many and no timing, for tools that count instructions.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "two_sides.hpp"

namespace {

std::atomic<uint64_t> allocations{0};

}  // namespace

// Every allocation of C++ in this program, the core's and the double's among them, comes by here.
void* operator new(size_t size) {
  allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* made = std::malloc(size)) return made;
  throw std::bad_alloc();
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }

namespace {

using namespace checks;

constexpr size_t kBatch = 1024;
constexpr size_t kBlock = 64;
constexpr size_t kStride = 128;  // a gap between blocks, so that none is merged with its neighbour

class Bench {
 public:
  explicit Bench(const std::string& library)
      : source_({{"library", library}, {"device", "null0"}}, kBatch * kStride, 1),
        target_({{"library", library}, {"device", "null0"}}, kBatch * kStride, 2),
        ops_(kBatch),
        done_(kBatch) {
    source_.meet(target_, 2);
    for (size_t i = 0; i < kBatch; ++i) ops_[i] = source_.op(MC_WRITE, i * kStride, kBlock, 1);
    source_.submit(ops_[0]);
    require(source_.wait().status == MC_OK, "the first one completes");
  }
  // Submits `batch` operations at a time until `count` are done.
  void run(size_t count, size_t batch) {
    size_t accepted = 0, done = 0, sent = 0;
    while (done < count) {
      size_t wanted = std::min(batch, count - sent);
      if (wanted > 0) {
        mc_status status = table->submit(source_.endpoint, ops_.data(), wanted, &accepted);
        require(status == MC_OK || status == MC_AGAIN, "submit");
        sent += accepted;
      }
      size_t fetched = 0;
      require(table->poll(source_.endpoint, done_.data(), done_.size(), &fetched) == MC_OK, "poll");
      for (size_t i = 0; i < fetched; ++i) require(done_[i].status == MC_OK, "every one completes");
      done += fetched;
    }
  }

 private:
  Side source_, target_;
  std::vector<mc_op> ops_;
  std::vector<mc_completion> done_;
};

double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

}  // namespace

int main(int count, char** arguments) {
  require(count >= 3, "usage: hot_path LIBRARY SECONDS [OPERATIONS]");
  Bench bench(arguments[1]);
  void (*counters)(uint64_t*) = nullptr;
  void* loaded = dlopen(arguments[1], RTLD_NOW | RTLD_NOLOAD);
  require(loaded != nullptr, "the double is loaded");
  counters = reinterpret_cast<void (*)(uint64_t*)>(dlsym(loaded, "verbs_double_counters"));
  bench.run(64 * kBatch, kBatch);  // queues grow to their size
  std::vector<double> rates;
  rates.reserve(100'000);
  uint64_t before[4], after[4];
  counters(before);
  uint64_t allocated = allocations;
  uint64_t total = count > 3 ? std::strtoull(arguments[3], nullptr, 10) : 0;
  if (total > 0) {
    bench.run(total, kBatch);
  } else {
    double seconds = std::atof(arguments[2]);
    for (uint64_t until = now_ns() + static_cast<uint64_t>(seconds * 1e9); now_ns() < until;) {
      constexpr size_t kRound = 512 * kBatch;
      double cpu = cpu_seconds();
      bench.run(kRound, kBatch);
      rates.push_back(static_cast<double>(kRound) / (cpu_seconds() - cpu));
      total += kRound;
    }
  }
  allocated = allocations - allocated;
  std::sort(rates.begin(), rates.end());
  double median = rates.empty() ? 0 : rates[rates.size() / 2];
  counters(after);
  std::printf(
      "{\"operations\": %llu, \"operations_per_cpu_s\": %.0f, \"doorbells\": %llu, \"requests\": %llu, "
      "\"signalled\": %llu, \"inline\": %llu, \"allocations\": %llu}\n",
      static_cast<unsigned long long>(total), median, static_cast<unsigned long long>(after[0] - before[0]),
      static_cast<unsigned long long>(after[1] - before[1]),
      static_cast<unsigned long long>(after[2] - before[2]),
      static_cast<unsigned long long>(after[3] - before[3]), static_cast<unsigned long long>(allocated));
  return 0;
}
