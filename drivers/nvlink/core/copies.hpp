// Copies by the GPUs' engines: streams, batches, and when they are over.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "devices.hpp"
#include "memory.hpp"
#include "support/chain.hpp"
#include "support/completions.hpp"

namespace mooncake::nvlink {

using driver::Completion;
using driver::Completions;

// One range to copy; both ends are in CUDA's address space.
struct Copy {
  uint64_t to;
  uint64_t from;
  uint64_t bytes;
};

// What is launched together and is over together.
struct Batch {
  // As new, with the room that it has.
  void clear();

  std::unique_ptr<Batch> next;  // of a chain
  int device = 0;               // whose engine copies
  std::vector<Copy> copies;
  std::vector<Completion> done;  // of the operations, as they are when all goes well
  // What must stay mapped; who must still live when it is over.
  std::vector<std::shared_ptr<RemoteMemory>> remotes;
  // Both ends are GPUs of this process that do not reach each other: CUDA goes through main memory.
  CUcontext to_context = nullptr, from_context = nullptr;

 private:
  friend class Copies;
  CUevent event = nullptr;  // null once launched: it could not be recorded, and the lane tells instead
  Status failure;
  // The copies once more, as cuMemcpyBatchAsync wants them.
  std::vector<CUdeviceptr> to, from;
  std::vector<size_t> sizes;
};
using Batches = driver::Chain<Batch>;

// Thread-safe.
class Copies {
 public:
  Copies(Devices& devices, Completions& completions, size_t streams)
      : devices_(devices), completions_(completions), streams_(streams) {}

  Status start();
  // Waits for what was launched, at most until the deadline.
  void settle(uint64_t deadline_ns);
  // And frees the streams. Nothing may be launched any more.
  void close(uint64_t deadline_ns);

  // An empty one, to be filled and launched.
  std::unique_ptr<Batch> take() { return spares_.take(); }
  // Completions of the batch follow in any case. With a stream of the user's the copies start after what it
  // holds, and what is put into it later starts after them.
  void launch(std::unique_ptr<Batch> batch, CUstream user = nullptr);
  // Looks what is over. Cheap when nothing was launched.
  void reap();
  // Until the next completion, a thread of this object looks.
  void watch();
  bool busy() const { return running_.load(std::memory_order_acquire) > 0; }

 private:
  struct Lane {
    std::mutex mutex;
    CUstream stream = nullptr;
    Batches running;
  };
  struct Engine {  // of one device
    std::vector<std::unique_ptr<Lane>> lanes;
    std::atomic<uint64_t> next{0};
  };

  Status prepare(int device, CUcontext& context);
  // The copies, and what tells when they are over.
  Status enqueue(Batch& batch, Lane& lane, CUstream user);
  Status enqueue_copies(Batch& batch, CUstream stream);
  Status enqueue_batch(Batch& batch, CUstream stream);
  Status follow(CUstream user, CUstream ours);
  static void fail(Batch& batch, const Status& why);
  // CUDA_ERROR_NOT_READY while it is under way.
  CUresult query(const Batch& batch, const Lane& lane);
  void reap_lane(Lane& lane);
  void finish(std::unique_ptr<Batch> batch);
  void give_up(std::unique_ptr<Batch> batch, const Status& why);
  void watch_until_stopped();

  Devices& devices_;
  Completions& completions_;
  const size_t streams_;
  std::mutex engines_mutex_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::atomic<uint64_t> running_{0};  // batches
  driver::Spares<Batch> spares_;
  std::atomic<bool> batch_function_works_{true};

  std::thread watcher_;
  std::mutex watch_mutex_;
  std::condition_variable watch_changed_;
  std::atomic<bool> watched_{false};
  bool stopping_ = false;
};

}  // namespace mooncake::nvlink
