// The slices of an engine, and the cookies by which drivers name them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "schedule.hpp"

namespace mooncake {

// A cookie names one submission of one slice and is good for one completion. What a driver says of any other
// cookie (a second completion, an operation that it never accepted, garbage) is found out and touches
// nothing.
class SliceTable {
 public:
  SliceTable() = default;
  ~SliceTable();
  SliceTable(const SliceTable&) = delete;
  SliceTable& operator=(const SliceTable&) = delete;

  // Under the engine's mutex.
  Slice& take();
  void give_back(Slice& slice);

  // Before each submission. `endpoint` is the one that shall complete it.
  void issue(Slice& slice, size_t endpoint);
  // It is not with the driver after all.
  static void withdraw(Slice& slice) { slice.ticket.store(0, std::memory_order_relaxed); }
  // By the thread that polls the endpoint, without a lock. Null: the driver has no such operation.
  Slice* redeem(uint64_t cookie, size_t endpoint) const;

 private:
  // Each slab is twice as large as the one before it, so few of them hold any number.
  static constexpr uint32_t kFirst = 256;
  static constexpr size_t kSlabs = 24;

  static size_t slab_of(uint32_t index) {
    return 31u - static_cast<size_t>(__builtin_clz(index / kFirst + 1));
  }
  static uint32_t begin_of(size_t slab) { return (kFirst << slab) - kFirst; }
  void grow();

  std::array<std::atomic<Slice*>, kSlabs> slabs_{};
  uint32_t size_ = 0;
  Slice* free_ = nullptr;
};

}  // namespace mooncake
