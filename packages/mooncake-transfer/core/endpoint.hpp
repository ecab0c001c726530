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

// What a driver says, at most `capacity` bytes of it, as text that can be shown: where it is not UTF-8, only
// its ASCII is kept.
std::string readable(const char* said, size_t capacity);

class Endpoint {
 public:
  using Options = std::vector<std::pair<std::string, std::string>>;
  using OnCompletions = std::function<void(const mc_completion*, size_t)>;

  Endpoint(const mc_driver_v1* table, std::string name, std::string device, int numa_node)
      : table_(table), name_(std::move(name)), device_(std::move(device)), numa_node_(numa_node) {}
  ~Endpoint() { close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;

  // Refuses a table of another major version, or one without every function of minor 0.
  static Status check(const mc_driver_v1* table);

  Status open(const Options& options);
  // Waits for calls in progress, then ends every operation. Safe to call twice.
  void close();
  // In a forked child: the driver's threads are not there, so nothing of it may be called any more.
  void abandon() { handle_ = 0; }

  const std::string& name() const { return name_; }      // of the driver
  const std::string& device() const { return device_; }  // the one it was opened on; empty: it has only one
  std::string label() const { return device_.empty() ? name_ : name_ + " " + device_; }
  // Reasons begin with the label; a line that names the rail does not need it.
  std::string without_label(std::string reason) const;
  int numa_node() const { return numa_node_; }
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
  // Both fail with kUnsupported when the driver is of ABI 1.0 or cannot do it.
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, std::string* blob);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  Status stats(mc_stats* stats);
  // Whether bytes of a write may land after its completion is out with an error.
  bool leaves_late_writes() const { return has(&mc_driver_v1::late_writes); }
  Status late_writes(mc_handle connection, std::string* token);
  Status fence(const std::string& token, uint64_t deadline_ns);

  // Takes the first `*accepted` operations. Not OK means the driver refused the first one that was not
  // accepted.
  Status submit(const mc_op* ops, size_t count, size_t* accepted, void* stream = nullptr);
  bool follows_streams() const { return has(&mc_driver_v1::submit_on_stream); }
  void cancel(uint64_t cookie);
  // Hands every waiting completion to `on_completions`; returns how many. Only one thread at a time does so:
  // with `wait_for_turn` false a second one returns 0 at once.
  size_t poll(bool wait_for_turn, const OnCompletions& on_completions);
  // True when the descriptor will become readable; false when completions are waiting already.
  bool arm();
  int event_fd();
  // Whether it brings messages behind writes.
  bool has_notices() const { return has_notices_; }
  // False when its queue is full, when it refuses, or when `broken`: completions polled until now have set
  // it.
  bool notify(mc_handle connection, const std::string& bytes, uint64_t cookie,
              const std::atomic<bool>& broken);
  // Hands out those of peers, one after another. One thread at a time.
  void poll_notices(const std::function<void(const char*, size_t)>& on_notice);

  std::atomic<bool> enabled{true};       // whether transfers of this engine may use it
  std::atomic<uint64_t> outstanding{0};  // operations accepted and not yet completed
  std::atomic<uint64_t> faults{0};       // how often the driver did what its contract forbids
  std::atomic<uint64_t> notices_sent{0}, notices_received{0};
  std::atomic<uint64_t> notices_dropped{0};  // of those that came: of nobody we know, or come again

 private:
  Status status_of(mc_status status) const;
  // Whether the driver's table is long enough for a function of a later minor, and has it.
  template <typename Member>
  bool has(Member mc_driver_v1::* member) const;
  template <typename Call>
  Status guarded(Call&& call);
  template <typename Call>
  Status guarded_handle(const char* call, mc_handle* handle, Call&& make);
  template <typename Call>
  Status guarded_blob(const char* call, std::string* blob, Call&& fill);
  // Counts it, and says it.
  Status fault(const std::string& what);

  const mc_driver_v1* table_;
  std::string name_;
  std::string device_;
  int numa_node_;
  mc_handle handle_ = 0;
  const pid_t owner_ = getpid();
  mc_caps caps_{};
  bool has_notices_ = false;
  std::shared_mutex life_;  // shared by calls, exclusive for close
  std::mutex turn_;         // held by the thread that polls
  std::vector<mc_completion> polled_;
  std::vector<mc_notice> notices_;
};

template <typename Member>
bool Endpoint::has(Member mc_driver_v1::* member) const {
  auto place = reinterpret_cast<const char*>(&(table_->*member)) - reinterpret_cast<const char*>(table_);
  return static_cast<size_t>(place) + sizeof(Member) <= table_->struct_size && table_->*member != nullptr;
}

}  // namespace mooncake
