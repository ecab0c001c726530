// The thread that talks to HIXL: its calls belong to the ACL context in which the engine was created.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "acl.hpp"
#include "batch.hpp"
#include "links.hpp"
#include "local_copies.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "registrations.hpp"

namespace mooncake::ascend {

// Memory that HIXL is to forget. Whoever waits may do so again and again.
class Removal {
 public:
  explicit Removal(const Memory& memory) : memory(memory), over_(promise_.get_future().share()) {}
  const Memory memory;
  // MC_TIMEOUT: it goes on.
  Status wait(uint64_t deadline_ns) const;
  void done() { promise_.set_value(); }

 private:
  std::promise<void> promise_;
  std::shared_future<void> over_;
};

// Thread-safe.
class Worker {
 public:
  Worker(const Options& options, Completions& completions);

  // Makes the ACL context and the HIXL engine, which listens at options.host; `engine` is its name.
  Status start(std::string& engine);
  void stop();

  // Registers device memory, and main memory of aclrtMallocHost where links go by RDMA; says what it did.
  // Waits while the thread connects to a peer; MC_TIMEOUT: nothing was registered.
  Status add_memory(Memory& memory);
  // Begins; it is over when no link of ours may use the memory, and HIXL has forgotten it.
  std::shared_ptr<Removal> remove_memory(const Memory& memory);
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

  // An empty one, to be filled and launched.
  std::unique_ptr<Batch> take() { return spares_.take(); }
  void launch(std::unique_ptr<Batch> batch);
  // Ends what has not begun.
  void cancel(uint64_t cookie, const Status& why);
  // No region of the engine is used any more: its link ends, then `life`.
  void forget(const std::string& engine, std::shared_ptr<void> life);

 private:
  void run();
  // Until there is something to do.
  void wait(std::unique_lock<std::mutex>& lock);
  Status open(std::string& engine);
  Status make_engine(const std::string& engine, uint16_t port);
  void close();
  // False when the thread has ended.
  bool call(std::function<void()> task);
  Status register_memory(Memory& memory);
  bool is_pinned(const Memory& memory) const;
  void go_on_removing();
  void begin(std::unique_ptr<Batch> batch);
  void finish(std::unique_ptr<Batch> batch, Status status);

  const Options options_;
  Completions& completions_;
  Acl acl_;
  void* engine_ = nullptr;
  Registrations registrations_;
  Links links_;
  LocalCopies local_copies_;
  std::vector<std::shared_ptr<Removal>> removals_;
  uint64_t remove_again_ns_ = 0;
  std::atomic<uint64_t> generation_{0};
  driver::Spares<Batch> spares_;

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // before batches
  Batches waiting_;
  bool stopping_ = false;
  bool stopped_ = false;
};

}  // namespace mooncake::ascend
