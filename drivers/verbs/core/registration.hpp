// Memory that the device may touch.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "device.hpp"

namespace mooncake::verbs {

struct MemoryRange {
  uint64_t address = 0;
  uint64_t length = 0;
  uint32_t kind = MC_DRAM;
  int fd = -1;  // a DMA-BUF, for memory of a GPU
  uint64_t fd_offset = 0;
};

// Registered as long as this lives; ending it waits until the device has let go. Large memory is registered
// in chunks, in parallel: devices limit the size, and pinning is slow. Device addresses run through all of
// it.
class Registration {
 public:
  static Status make(Device& device, const Options& options, const MemoryRange& range, unsigned access,
                     std::shared_ptr<Registration>& made);
  ~Registration();

  // Set when the device has let go.
  std::shared_ptr<const std::atomic<bool>> ended() const { return ended_; }
  uint64_t iova() const { return iova_; }
  uint64_t length() const { return range_.length; }
  uint64_t address() const { return range_.address; }
  uint32_t kind() const { return range_.kind; }
  unsigned chunk_shift() const { return chunk_shift_; }
  size_t chunks() const { return regions_.size(); }
  uint32_t lkey(uint64_t offset) const { return regions_[offset >> chunk_shift_]->lkey; }
  uint32_t rkey(size_t chunk) const { return regions_[chunk]->rkey; }

 private:
  Registration(Device& device, const MemoryRange& range) : device_(device), range_(range) {}
  // 0 or an errno.
  int add(size_t chunk, unsigned access, bool relaxed);

  Device& device_;
  const MemoryRange range_;
  uint64_t iova_ = 0;
  unsigned chunk_shift_ = 63;
  std::vector<ibv::Mr*> regions_;
  const std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
};

}  // namespace mooncake::verbs
