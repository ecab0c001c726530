// The thread that talks to HIXL: its calls belong to the ACL context in which the engine was created.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "acl.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "registrations.hpp"
#include "support/chain.hpp"
#include "support/completions.hpp"
#include "support/os.hpp"
#include "support/peers/asker.hpp"

namespace mooncake::ascend {

using driver::Completion;
using driver::Completions;

// A peer's region, as its owner described it.
struct RemoteMemory : driver::Opened {
  ~RemoteMemory() override;
  uint64_t address = 0;
  bool on_device = false;
  std::string engine;                    // of the owner; empty: this process
  uint64_t generation = 0;               // of the owner's registrations, when this one was there
  std::shared_ptr<class Worker> worker;  // is told when nobody uses the region any more
};

struct Batch {
  // As new, with the room that it has.
  void clear();

  std::unique_ptr<Batch> next;  // of a chain
  mc_opcode opcode = MC_READ;
  bool local_on_device = false;
  std::shared_ptr<RemoteMemory> remote;
  std::vector<mc_ascend_desc> descs;
  std::vector<Completion> done;
  uint64_t bytes = 0;

 private:
  friend class Worker;
  // Of the transfer that HIXL has begun.
  void* request = nullptr;
  uint64_t deadline_ns = 0;
};
using Batches = driver::Chain<Batch>;

// Thread-safe.
class Worker {
 public:
  Worker(const Options& options, Completions& completions) : options_(options), completions_(completions) {}

  // Makes the ACL context and the HIXL engine, which listens at options.host; `engine` is its name.
  Status start(std::string& engine);
  void stop();

  // Registers or deregisters device memory, and waits for it (the worker waits for no peer then).
  Status add_memory(uint64_t address, uint64_t length);
  void remove_memory(uint64_t address, uint64_t length);
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }

  // An empty one, to be filled and launched.
  std::unique_ptr<Batch> take() { return spares_.take(); }
  void launch(std::unique_ptr<Batch> batch);
  // Ends what has not begun.
  void cancel(uint64_t cookie, const Status& why);
  // No region of the engine is used any more: its link ends, then `life`.
  void forget(const std::string& engine, std::shared_ptr<void> life);

 private:
  struct Peer {
    bool connected = false;
    uint64_t theirs = 0, ours = 0;  // generations of the registrations at the time
    Batches running;
  };

  void run();
  Status open(std::string& engine);
  void close();
  // False when the thread has ended.
  bool call(std::function<void()> task);
  void begin(std::unique_ptr<Batch> batch);
  Status connect(const std::string& engine, Peer& peer, uint64_t generation);
  void disconnect(const std::string& engine, Peer& peer);
  void drain(const std::string& engine, Peer& peer);
  // Whether any is over.
  bool look(const std::string& engine, Peer& peer);
  bool look_at_all();
  Status copy_here(const Batch& batch);
  Status copy_by_batch(const Batch& batch, bool& done);
  void finish(std::unique_ptr<Batch> batch, Status status);

  const Options options_;
  Completions& completions_;
  Acl acl_;
  void* engine_ = nullptr;
  aclrtStream stream_ = nullptr;
  Registrations registrations_;
  std::map<std::string, Peer> peers_;
  std::atomic<uint64_t> generation_{0};
  driver::Spares<Batch> spares_;
  // As aclrtMemcpyBatch wants the copies of a batch.
  std::vector<void*> to_, from_;
  std::vector<size_t> sizes_;

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;  // before batches
  Batches waiting_;
  bool stopping_ = false;
  bool stopped_ = false;
};

}  // namespace mooncake::ascend
