// A thread with an epoll: everything that happens on a socket happens on the one worker that owns it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "descriptor.hpp"
#include "region.hpp"
#include "status.hpp"

namespace mooncake_tcp {

// Something with a descriptor in a worker's epoll. All calls come from the worker's thread.
class Watched {
 public:
  virtual ~Watched() = default;
  // `events` is 0 after again().
  virtual void on_events(uint32_t events) = 0;
  virtual void on_deadline() {}
  // Some region was revoked: stop using revoked ones wherever the wire format allows it.
  virtual void on_revoked() {}
  // Stop using this region whatever it takes.
  virtual void on_abort(const Region&) {}
  // The worker ends.
  virtual void on_stop() = 0;
};

class Worker {
 public:
  using Task = std::function<void()>;

  Status start(const std::string& name);
  // Stops what it watches, drops tasks that have not run, joins the thread.
  void stop();

  // From any thread. A task that has not run when the worker stops never runs.
  void post(Task task);

  // The rest only on the worker's own thread. `owner` keeps `watched` alive; returns a token, 0 on failure
  // (errno).
  uint64_t watch(int fd, uint32_t events, Watched* watched, std::shared_ptr<void> owner);
  void change(uint64_t token, int fd, uint32_t events);
  void forget(uint64_t token, int fd);
  // 0: none.
  void set_deadline(uint64_t token, uint64_t deadline_ns);
  // Calls on_events(0) once the others have had their turn.
  void again(uint64_t token);
  void each(const std::function<void(Watched&)>& action);

 private:
  struct Entry {
    Watched* watched;
    std::shared_ptr<void> owner;
  };

  void run();
  void dispatch(uint64_t token, uint32_t events);
  void run_tasks();
  void run_again();
  void run_deadlines();
  int wait_ms() const;

  Descriptor epoll_;
  Descriptor wake_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // tasks_
  std::vector<Task> tasks_;
  uint64_t next_token_ = 1;
  std::unordered_map<uint64_t, Entry> watched_;
  std::map<uint64_t, uint64_t>
      deadlines_;  // by token; only connections being set up have one, so it stays small
  std::vector<uint64_t> again_;
};

}  // namespace mooncake_tcp
