// Finished operations on their way to the engine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "mooncake_driver.h"
#include "os.hpp"
#include "status.hpp"

namespace mooncake::shm {

struct Completion {
  uint64_t cookie = 0;
  uint64_t bytes = 0;
  mc_opcode opcode = MC_READ;
  mc_status code = MC_OK;
  std::unique_ptr<std::string> reason;  // null when code is MC_OK

  void fail(const Status& status) {
    code = status.code;
    reason = std::make_unique<std::string>(status.reason);
  }
};

// Thread-safe. Counts what is on its way, so that a submitter that never polls is told to.
class Completions {
 public:
  explicit Completions(size_t depth) : depth_(depth) {}

  Status open();

  // How many of `wanted` operations there is room for; each of them must be pushed once.
  size_t reserve(size_t wanted);
  void push(std::span<Completion> finished);

  size_t poll(mc_completion* out, size_t capacity);
  // False when completions wait already. Otherwise the descriptor becomes readable with the next one.
  bool arm();
  int event_fd() const { return event_.get(); }
  void add_to(mc_stats& stats) const;

 private:
  const size_t depth_;
  UniqueFd event_;
  std::atomic<size_t> outstanding_{0};  // accepted and not polled
  std::atomic<size_t> waiting_{0};      // finished and not polled; changes under the lock only
  mutable std::mutex mutex_;
  // From `head_` on. It begins at the front again whenever it is empty, which keeps it in the cache.
  std::vector<Completion> finished_;
  size_t head_ = 0;
  bool armed_ = false;
  bool signalled_ = false;
  mc_stats totals_{};
};

}  // namespace mooncake::shm
