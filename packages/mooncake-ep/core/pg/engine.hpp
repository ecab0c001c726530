// A rank of one group at work: collectives in the order of the calls, at once or by a thread of their own,
// and messages beside them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collectives.hpp"
#include "group.hpp"
#include "messages.hpp"

namespace mooncake::ep::pg {

class Engine {
 public:
  using Work = std::function<std::vector<int>(Collectives&, const Wait&)>;

  Engine(uint32_t capacity, int rank, int pid, int fd);
  ~Engine();
  Engine(const Engine&) = delete;

  Group& group() { return group_; }
  // Runs a collective after all that were queued before.
  Result run(const Work& work, const Wait& wait);
  // Leaves it to the engine. Memory stays the caller's until it is done.
  uint64_t queue(Work work, uint64_t timeout_ns);
  bool done(uint64_t ticket);
  // Waits until a queued collective has ended, by running it where nobody does yet. kTimeout leaves it
  // running.
  Result finish(uint64_t ticket, const Wait& wait);
  // Runs what changes the members, in the order of the collectives.
  Result change(const std::function<std::vector<int>(Group&)>& change);
  Result join(const Wait& wait);

  uint64_t send(int to, const uint8_t* data, uint64_t nbytes, int64_t tag);
  uint64_t receive(int from, uint8_t* data, uint64_t nbytes, int64_t tag);
  bool message_done(uint64_t number);
  Result finish_message(uint64_t number, const Wait& wait);
  // Lets a thread move messages while the caller does something else.
  void move_messages_aside();
  // Ends the threads. What is still queued is not run. This rank leaves the group.
  void close();

 private:
  struct Task {
    uint64_t ticket;
    Work work;
    uint64_t timeout_ns;
  };

  Result guarded(const Work& work, const Wait& wait);
  bool run_next(Interrupted interrupted);
  void run_queued();
  void run_messages();
  void move_until_idle();
  void check_open() const;

  Group group_;
  Collectives collectives_{group_};
  Messages messages_{group_};

  std::mutex running_;  // a collective; locked before queue_mutex_
  std::mutex queue_mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  std::atomic<size_t> unfinished_{0};
  std::unordered_map<uint64_t, Result> results_;
  uint64_t next_ticket_ = 1;
  std::thread worker_;

  std::mutex mover_mutex_;
  std::condition_variable to_move_;
  std::atomic<bool> moving_{false};
  std::atomic<int> waiting_{0};  // callers that move messages while they wait
  std::thread mover_;
  std::atomic<bool> closed_{false};
  uint32_t generation_ = driver::fork_generation();
};

}  // namespace mooncake::ep::pg
