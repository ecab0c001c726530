// Finished operations on their way to the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>

#include "mooncake_driver.h"
#include "wire.hpp"

namespace template_driver {

// Thread-safe.
class Completions {
 public:
  Completions();  // throws std::runtime_error when no descriptor is free
  ~Completions();

  void push(const mc_op& op, uint64_t bytes, const Status& status);
  size_t poll(mc_completion* out, size_t capacity);
  // Readable from the next completion on, after arm() returned true. False: completions are waiting already.
  bool arm();
  int event_fd() const { return event_fd_; }
  mc_stats totals();

 private:
  int event_fd_;
  std::mutex mutex_;
  std::deque<mc_completion> finished_;
  mc_stats totals_{};
  bool armed_ = false;
};

}  // namespace template_driver
