// The handles of the ABI: what the engine holds in place of a driver's objects.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "mooncake_driver.h"
#include "status.hpp"

namespace mooncake::driver {

// Never 0 and never given twice in a process, over all tables.
inline uint64_t new_serial() {
  static std::atomic<uint64_t> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Thread-safe. Looking up takes no lock: an operation names three objects, and a small one is copied in less
// time than three locks take. That is sound because the ABI forbids to use a handle during or after the call
// that gives it back; a stale one is still found out, as no handle is ever given twice.
template <class Object>
class HandleTable {
 public:
  HandleTable() = default;
  ~HandleTable() {
    for (auto& chunk : chunks_) delete[] chunk.load(std::memory_order_relaxed);
  }
  HandleTable(const HandleTable&) = delete;
  HandleTable& operator=(const HandleTable&) = delete;

  // MC_NO_MEMORY when the table is full (a million objects).
  Status add(std::shared_ptr<Object> object, mc_handle* given) {
    std::lock_guard lock(mutex_);
    uint32_t index = used_;
    if (!free_.empty()) {
      index = free_.back();
      free_.pop_back();
    } else if (used_ == kChunks * kChunkSlots) {
      return failed(MC_NO_MEMORY, "there are as many handles as there can be; release some");
    } else {
      auto& chunk = chunks_[index / kChunkSlots];
      if (chunk.load(std::memory_order_relaxed) == nullptr)
        chunk.store(new Slot[kChunkSlots], std::memory_order_release);
      ++used_;
    }
    Slot& slot = chunks_[index / kChunkSlots].load(std::memory_order_relaxed)[index % kChunkSlots];
    slot.object = std::move(object);
    mc_handle handle = new_serial() << kIndexBits | index;
    slot.handle.store(handle, std::memory_order_release);
    *given = handle;
    return {};
  }

  // Null for a handle that was never given or has been given back. The pointer holds until take().
  const std::shared_ptr<Object>* find(mc_handle handle) const {
    uint32_t index = static_cast<uint32_t>(handle) & (kChunks * kChunkSlots - 1);
    Slot* chunk = chunks_[index / kChunkSlots].load(std::memory_order_acquire);
    if (chunk == nullptr || handle == 0) return nullptr;
    Slot& slot = chunk[index % kChunkSlots];
    return slot.handle.load(std::memory_order_acquire) == handle ? &slot.object : nullptr;
  }

  std::shared_ptr<Object> get(mc_handle handle) const {
    const std::shared_ptr<Object>* found = find(handle);
    return found == nullptr ? nullptr : *found;
  }

  std::shared_ptr<Object> take(mc_handle handle) {
    std::lock_guard lock(mutex_);
    if (find(handle) == nullptr) return nullptr;
    uint32_t index = static_cast<uint32_t>(handle) & (kChunks * kChunkSlots - 1);
    Slot& slot = chunks_[index / kChunkSlots].load(std::memory_order_relaxed)[index % kChunkSlots];
    slot.handle.store(0, std::memory_order_release);
    free_.push_back(index);
    return std::exchange(slot.object, nullptr);
  }

 private:
  static constexpr uint32_t kIndexBits = 20;
  static constexpr uint32_t kChunkSlots = 1024;
  static constexpr uint32_t kChunks = (1u << kIndexBits) / kChunkSlots;

  struct Slot {
    std::atomic<mc_handle> handle{0};
    std::shared_ptr<Object> object;
  };

  std::array<std::atomic<Slot*>, kChunks> chunks_{};
  std::mutex mutex_;
  uint32_t used_ = 0;
  std::vector<uint32_t> free_;
};

}  // namespace mooncake::driver
