// What waits for a peer: transfers that are not fully cut yet, and slices to be tried again.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "mooncake_driver.h"

namespace mooncake {

class Transfer;

enum class Priority : uint8_t { kHigh = 0, kNormal = 1, kLow = 2 };
constexpr size_t kPriorities = 3;

// Of masks with a bit for each rail of a peer.
constexpr uint64_t rail_bit(size_t rail) { return uint64_t{1} << rail; }

// A part of a transfer that is, or soon will be, with a driver.
struct Slice {
  Transfer* transfer = nullptr;
  mc_op op{};
  uint32_t rail = 0;      // index into the peer's rails
  uint32_t attempts = 0;  // rounds through all rails that ended without success
  uint64_t tried = 0;     // rails of this round, a bit each
  uint64_t queued = 0;    // bytes on the rail when it was submitted, itself included
  uint64_t submitted_ns = 0;
  uint64_t not_before_ns = 0;
  bool with_driver = false;
  bool notice = false;  // no part, but the message behind all of them
  // Of the slice table: its place there, the cookie that a driver may complete now (0: none), and which
  // driver.
  uint32_t index = 0;
  uint32_t submission = 0;
  uint32_t endpoint = 0;
  std::atomic<uint64_t> ticket{0};
  // Neighbours in the transfer's list of slices; `next` also links free ones.
  Slice* previous = nullptr;
  Slice* next = nullptr;
};

struct Waiting {
  std::shared_ptr<Transfer> transfer;
  uint64_t since_ns;
};

struct PeerQueue {
  std::array<std::deque<Waiting>, kPriorities> waiting;
  std::deque<Slice*> retries;
  std::vector<Waiting> fenced;  // writes that must wait until bytes of others can no longer land on theirs
  uint64_t fenced_until_ns = 0;
  bool ready = false;    // in the engine's ready set, under `key`
  bool blocked = false;  // its rails are full: a completion makes it ready again
  uint64_t key = 0;
  uint64_t placed = 0;  // slices, so far

  bool empty() const {
    for (const auto& queue : waiting) {
      if (!queue.empty()) return false;
    }
    return retries.empty() && fenced.empty();
  }
};

}  // namespace mooncake
