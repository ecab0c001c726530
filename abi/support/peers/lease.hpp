// Leases: how a region's owner takes memory back from peers that copy without asking.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "../os.hpp"

namespace mooncake::driver {

// One region granted to one peer, in memory that both map. The word holds a token (high half) and the number
// of copies in flight (low half); as both change in one atomic step, a copy either sees that its token is
// gone or is counted before the owner looks. A slot whose count is zero may be granted again: an old holder's
// token no longer fits.
class LeaseSlot {
 public:
  uint32_t token() const { return static_cast<uint32_t>(word_.load(std::memory_order_acquire) >> 32); }

  // Copier: true when the token still holds; then leave() must follow. False: hands off, the region is
  // withdrawn.
  bool enter(uint32_t token) {
    uint64_t before = word_.fetch_add(1, std::memory_order_acq_rel);
    if (static_cast<uint32_t>(before >> 32) == token) return true;
    leave(token);
    return false;
  }
  void leave(uint32_t token) {
    uint64_t before = word_.fetch_sub(1, std::memory_order_acq_rel);
    if (static_cast<uint32_t>(before >> 32) != token) wake_owner();
  }

  // Owner: ends the token. Copies that have entered go on; wait_idle() tells when they have left.
  void revoke();
  // False when the deadline passed with copies in flight. `holder_gone` is read again and again: the copies
  // of a process that has died never leave.
  bool wait_idle(uint64_t deadline_ns, const std::atomic<bool>& holder_gone) const;
  bool idle() const { return static_cast<uint32_t>(word_.load(std::memory_order_acquire)) == 0; }

 private:
  void wake_owner();

  alignas(64) std::atomic<uint64_t> word_{0};  // a cache line of its own: regions do not slow one another
};

static_assert(std::atomic<uint64_t>::is_always_lock_free, "the word is shared between processes");
static_assert(sizeof(LeaseSlot) == 64);

// The slots of one connection: a small memfd, made by the target and passed to the initiator.
class LeasePage {
 public:
  static constexpr uint32_t kSlots =
      16384;  // 1 MiB of addresses; a page of it becomes memory when it is first used

  // Target: makes the page, and the descriptor to pass on.
  static Status create(std::shared_ptr<LeasePage>& page, UniqueFd& fd);
  // Initiator: maps a page that it was passed, after checking that its maker cannot shrink it under us.
  static Status open(int fd, std::shared_ptr<LeasePage>& page);

  ~LeasePage();
  LeasePage(const LeasePage&) = delete;
  LeasePage& operator=(const LeasePage&) = delete;

  LeaseSlot& slot(uint32_t index) { return slots_[index]; }

 private:
  explicit LeasePage(LeaseSlot* slots) : slots_(slots) {}
  static Status map(int fd, std::shared_ptr<LeasePage>& page);

  LeaseSlot* slots_;
};

}  // namespace mooncake::driver
