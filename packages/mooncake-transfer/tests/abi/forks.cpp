// A child that is forked while a thread holds the locks of a driver: exit status 0 when it can use the
// driver.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "support/table.hpp"

using namespace mooncake::driver;

namespace {

struct Registry {
  std::mutex mutex;
  int entries = 0;
};

// What the compiler asks of a driver's class; only its life is of interest here.
struct Endpoint {
  static Status open(const mc_option*, size_t, std::shared_ptr<Endpoint>& made) {
    made = std::make_shared<Endpoint>();
    return {};
  }
  void close() {}
  Status caps(mc_caps&) { return {}; }
  Status stats(mc_stats&) { return {}; }
  Status export_address(void*, size_t*) { return {}; }
  Status connect(const void*, size_t, mc_handle*) { return {}; }
  void disconnect(mc_handle) {}
  Status register_memory(const mc_memory&, mc_handle*) { return {}; }
  Status deregister_memory(mc_handle, uint64_t) { return {}; }
  Status export_key(mc_handle, void*, size_t*) { return {}; }
  Status import_key(mc_handle, uint64_t, const uint8_t*, uint64_t, const void*, size_t, mc_handle*) {
    return {};
  }
  void release_key(mc_handle) {}
  Status submit(const mc_op*, size_t, size_t*) { return {}; }
  size_t poll(mc_completion*, size_t) { return 0; }
  int event_fd() { return -1; }
  bool arm() { return true; }
  void cancel(uint64_t) {}
};

int in_the_child(const mc_driver_v1& table, mc_handle parents) {
  alarm(60);  // ends it when it hangs
  std::lock_guard lock(of_this_process<Registry>().mutex);
  if (of_this_process<Registry>().entries != 0) return 2;
  mc_stats stats{};
  stats.struct_size = sizeof stats;
  mc_handle own = 0;
  if (table.stats(parents, &stats) != MC_CLOSED) return 3;
  if (table.open(nullptr, 0, &own) != MC_OK || own == parents) return 4;
  if (table.stats(own, &stats) != MC_OK) return 5;
  table.close(own);
  return 0;
}

}  // namespace

int main() {
  const mc_driver_v1& table = *Table<Endpoint>::make("forks");
  mc_handle handle = 0;
  if (table.open(nullptr, 0, &handle) != MC_OK) return 6;
  std::atomic<int> step{0};
  std::thread holder([&] {
    std::lock_guard lock(of_this_process<Registry>().mutex);
    of_this_process<Registry>().entries = 1;
    step = 1;
    step.notify_one();
    step.wait(1);
  });
  step.wait(0);
  pid_t child = fork();
  if (child == 0) _exit(in_the_child(table, handle));
  int status = 0;
  waitpid(child, &status, 0);
  step = 2;
  step.notify_one();
  holder.join();
  if (of_this_process<Registry>().entries != 1) return 7;
  table.close(handle);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 8;
}
