// One driver, opened: its C function table and the handle of its endpoint in this engine.
#pragma once

#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "status.hpp"

namespace mooncake {

class Endpoint {
 public:
  using Options = std::vector<std::pair<std::string, std::string>>;
  using OnCompletion = std::function<void(const mc_completion&)>;

  Endpoint(const mc_driver_v1* table, std::string name) : table_(table), name_(std::move(name)) {}
  ~Endpoint() { close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Refuses a table of another major version or one too small to hold every function of this one.
  static Status check(const mc_driver_v1* table);

  Status open(const Options& options);
  // Waits for calls in progress, then ends every operation. Safe to call twice.
  void close();
  // In a forked child: the driver's threads are not there, so nothing of it may be called any more.
  void abandon() { handle_ = 0; }

  const std::string& name() const { return name_; }
  const mc_caps& caps() const { return caps_; }
  bool takes(mc_memory_kind kind) const { return (caps_.memory_kinds >> kind) & 1u; }

  Status export_address(std::string* blob);
  Status connect(const std::string& address, mc_handle* connection);
  void disconnect(mc_handle connection);
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status export_key(mc_handle registered, std::string* blob);
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t length,
                    const std::string& blob, mc_handle* remote);
  void release_key(mc_handle remote);
  Status stats(mc_stats* stats);

  // Takes the first `*accepted` operations. Not OK means the driver refused the first one that was not
  // accepted.
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  void cancel(uint64_t cookie);
  // Hands every waiting completion to `on_completion`; returns how many. Only one thread at a time does so:
  // with `wait_for_turn` false a second one returns 0 at once.
  size_t poll(bool wait_for_turn, const OnCompletion& on_completion);
  // True when the descriptor will become readable; false when completions are waiting already.
  bool arm();
  int event_fd();

  std::atomic<uint64_t> outstanding{0};  // operations accepted and not yet completed

 private:
  Status status_of(mc_status status) const;
  template <typename Call>
  Status guarded(Call&& call);

  const mc_driver_v1* table_;
  std::string name_;
  mc_handle handle_ = 0;
  const pid_t owner_ = getpid();
  mc_caps caps_{};
  std::shared_mutex life_;  // shared by calls, exclusive for close
  std::mutex turn_;         // held by the thread that polls
  std::vector<mc_completion> polled_;
};

}  // namespace mooncake
