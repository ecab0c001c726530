// A thread with a poller: what it watches is only touched on that thread, unless its class says otherwise.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "poller.hpp"

namespace mooncake_tcp {

// How long a thread looks for events before it sleeps. Looking pays when the next event is a few microseconds
// away, because waking up takes longer. It does not when events are rare, or when somebody else needs the
// core, who may be the very one to bring the event. So looks that find nothing make the next ones rarer.
class SpinBudget {
 public:
  // For how long to look.
  uint64_t ns(uint64_t now);
  // Whether it found something.
  void looked(bool found);
  // Two looks in a row were so far apart that somebody else must have had the core in between.
  void lost_core(uint64_t now) { off_until_ns_ = now + kOffNs; }

  static constexpr uint64_t kMostNs = 250'000;
  static constexpr uint64_t kLostCoreNs = 200'000;

 private:
  static constexpr uint64_t kOffNs = 5'000'000;
  static constexpr uint32_t kFewestPauses = 16;
  static constexpr uint32_t kMostPauses = 1024;
  uint32_t misses_ = 0;
  uint32_t pauses_ = 0;  // times that it shall not look yet
  uint32_t next_pauses_ = kFewestPauses;
  uint64_t off_until_ns_ = 0;
};

class Worker {
 public:
  using Task = std::function<void()>;

  Status start(const std::string& name);
  // Stops what it watches, drops tasks that have not run, joins the thread.
  void stop();

  // From any thread. A task that has not run when the worker stops never runs.
  void post(Task task);
  Poller& poller() { return poller_; }

  // The rest only on the worker's own thread. 0: none.
  void set_deadline(uint64_t token, uint64_t deadline_ns);
  // Calls on_events(0) once the others have had their turn.
  void again(uint64_t token);
  void each(const std::function<void(Watched&)>& action);

 private:
  void run();
  int wait(epoll_event* events, int most);
  void run_tasks();
  void run_again();
  void run_deadlines();
  int wait_ms() const;

  Poller poller_;
  Descriptor wake_;
  uint64_t wake_token_ = 0;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::mutex mutex_;  // tasks_
  std::vector<Task> tasks_;
  // By token; only connections being set up have one, so it stays small.
  std::map<uint64_t, uint64_t> deadlines_;
  std::vector<uint64_t> again_;
  SpinBudget spin_;
};

}  // namespace mooncake_tcp
