// The service thread: waits for sockets, for the time and for work posted by other threads. It never blocks
// on a peer.
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

#include "../os.hpp"

namespace mooncake::driver {

class Loop {
 public:
  using Task = std::function<void()>;
  using Handler = std::function<void(uint32_t epoll_events)>;

  ~Loop() { stop(); }

  // `name` is that of the thread.
  Status start(const char* name);
  // Joins the thread. Tasks not run yet are dropped.
  void stop();

  // From any thread; tasks run in the order they were posted.
  void post(Task task);

  // The rest is for the service thread alone.
  void at(uint64_t deadline_ns, Task task);
  bool watch(int fd, uint32_t epoll_events, Handler handler);
  void change(int fd, uint32_t epoll_events);
  void forget(int fd);

 private:
  // A descriptor number may be closed and used again between two events of one batch: the generation tells
  // them apart.
  struct Watched {
    uint32_t generation;
    std::shared_ptr<Handler> handler;
  };

  void run();
  void dispatch(uint64_t tag, uint32_t epoll_events);
  void run_posted();
  void run_due();
  int wait_ms() const;

  UniqueFd epoll_;
  UniqueFd wake_;
  std::string name_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};

  std::mutex mutex_;
  std::vector<Task> posted_;

  uint32_t generation_ = 0;
  std::unordered_map<int, Watched> watched_;
  std::multimap<uint64_t, Task> due_;
};

}  // namespace mooncake::driver
