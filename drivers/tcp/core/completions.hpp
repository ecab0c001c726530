// Finished operations on their way to the engine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

#include "descriptor.hpp"
#include "status.hpp"

namespace mooncake_tcp {

struct Counters {
  std::atomic<uint32_t> connections{0};
  std::atomic<uint64_t> ops{0};
  std::atomic<uint64_t> bytes_read{0};
  std::atomic<uint64_t> bytes_written{0};
  std::atomic<uint64_t> errors{0};
  std::atomic<uint64_t> refused{0};
};

class CompletionQueue {
 public:
  Status open();

  // Room for up to `wanted` more operations: every one accepted and not yet polled counts. Returns how many.
  size_t reserve(size_t wanted);
  void give_back(size_t unused);
  void push(uint64_t cookie, uint64_t bytes, const Status& status);
  size_t poll(mc_completion* completions, size_t capacity);
  // False when completions are waiting; otherwise the descriptor is readable as soon as one arrives.
  bool arm();
  int event_fd() const { return event_.get(); }

 private:
  Descriptor event_;
  std::mutex mutex_;
  std::deque<mc_completion> waiting_;
  size_t outstanding_ = 0;
  bool armed_ = false;
};

}  // namespace mooncake_tcp
