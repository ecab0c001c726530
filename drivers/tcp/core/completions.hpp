// Finished operations on their way to the engine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "descriptor.hpp"
#include "ring.hpp"
#include "status.hpp"

namespace mooncake_tcp {

struct Counters {
  std::atomic<uint32_t> connections{0};
  std::atomic<uint64_t> ops{0};
  std::atomic<uint64_t> bytes_read{0};
  std::atomic<uint64_t> bytes_written{0};
  std::atomic<uint64_t> errors{0};
  std::atomic<uint64_t> refused{0};
  std::atomic<uint32_t> strangers{0};  // connections of peers that have not said hello
};

struct Completion {
  uint64_t cookie = 0;
  uint64_t bytes = 0;
  Status status;
};

class CompletionQueue {
 public:
  Status open();

  // Room for up to `wanted` more operations: every one accepted and not yet polled counts. Returns how many.
  size_t reserve(size_t wanted);
  void give_back(size_t unused);
  void push(std::vector<Completion>& completions);
  size_t poll(mc_completion* completions, size_t capacity);
  // False when completions are waiting; otherwise the descriptor is readable as soon as one arrives.
  bool arm();
  int event_fd() const { return event_.get(); }
  bool empty() const { return count_.load(std::memory_order_acquire) == 0; }

 private:
  Descriptor event_;
  std::mutex mutex_;
  Ring<Completion> waiting_;
  std::atomic<size_t> count_{0};  // of `waiting_`, to look without the mutex
  size_t outstanding_ = 0;
  bool armed_ = false;
};

}  // namespace mooncake_tcp
