// Checksums of values by the number of their slot. Memory is taken only where there are some.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace mooncake::store {

class ValueSums {
 public:
  // 0: it is not known.
  uint64_t operator[](uint32_t at) const {
    size_t chunk = at >> kShift;
    return chunk < chunks_.size() && chunks_[chunk] != nullptr ? chunks_[chunk][at & kMask] : 0;
  }
  void set(uint32_t at, uint64_t sum) {
    size_t chunk = at >> kShift;
    if (sum == 0 && (chunk >= chunks_.size() || chunks_[chunk] == nullptr)) return;
    if (chunk >= chunks_.size()) chunks_.resize(chunk + 1);
    if (chunks_[chunk] == nullptr) chunks_[chunk] = std::make_unique<uint64_t[]>(1u << kShift);
    chunks_[chunk][at & kMask] = sum;
  }

 private:
  static constexpr uint32_t kShift = 14, kMask = (1u << kShift) - 1;
  std::vector<std::unique_ptr<uint64_t[]>> chunks_;
};

}  // namespace mooncake::store
