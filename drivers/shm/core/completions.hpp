// Finished operations on their way to the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>

#include "mooncake_driver.h"
#include "os.hpp"
#include "status.hpp"

namespace mooncake::shm {

struct Completion {
  uint64_t cookie;
  mc_opcode opcode;
  uint64_t bytes;
  Status status;
};

// Thread-safe. Counts what is on its way, so that a submitter that never polls is told to.
class Completions {
 public:
  explicit Completions(size_t depth) : depth_(depth) {}

  Status open();

  // How many of `wanted` operations there is room for; each of them must be pushed once.
  size_t reserve(size_t wanted);
  void push(std::span<Completion> finished);
  void push(Completion finished) { push(std::span(&finished, 1)); }

  size_t poll(mc_completion* out, size_t capacity);
  // False when completions wait already. Otherwise the descriptor becomes readable with the next one.
  bool arm();
  int event_fd() const { return event_.get(); }
  void add_to(mc_stats& stats) const;

 private:
  const size_t depth_;
  UniqueFd event_;
  mutable std::mutex mutex_;
  std::deque<Completion> finished_;
  size_t outstanding_ = 0;  // accepted and not polled
  bool armed_ = false;
  mc_stats totals_{};
};

}  // namespace mooncake::shm
