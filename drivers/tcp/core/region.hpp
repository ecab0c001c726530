// Registered memory: what peers may touch, and what operations of this side move from and to.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "status.hpp"
#include "wire.hpp"

namespace mooncake_tcp {

// Whether [offset, offset + length) lies in a range of `size` bytes; no sum is formed, so nothing can wrap.
inline bool inside(uint64_t offset, uint64_t length, uint64_t size) {
  return offset <= size && length <= size - offset;
}

class Region {
 public:
  Region(uint64_t id, uint64_t address, uint64_t length, const Key& key)
      : id_(id), base_(reinterpret_cast<std::byte*>(address)), length_(length), key_(key) {}

  uint64_t id() const { return id_; }
  uint64_t length() const { return length_; }
  const Key& key() const { return key_; }
  std::byte* at(uint64_t offset) const { return base_ + offset; }

  // False once revoked. Every use that began must end.
  bool begin_use();
  void end_use();

  void revoke();
  bool revoked() const;
  // True when the last use has ended by the deadline.
  bool wait_unused(uint64_t deadline_ns);

 private:
  const uint64_t id_;
  std::byte* const base_;
  const uint64_t length_;
  const Key key_;
  mutable std::mutex mutex_;
  std::condition_variable unused_;
  uint64_t uses_ = 0;
  bool revoked_ = false;
};

// One use of a region; while it lives the memory stays registered.
class RegionUse {
 public:
  RegionUse() = default;
  ~RegionUse() { release(); }
  RegionUse(RegionUse&& other) noexcept : region_(std::move(other.region_)) { other.region_.reset(); }
  RegionUse& operator=(RegionUse&& other) noexcept {
    if (this != &other) {
      release();
      region_ = std::move(other.region_);
      other.region_.reset();
    }
    return *this;
  }

  static RegionUse of(std::shared_ptr<Region> region) {
    RegionUse use;
    if (region && region->begin_use()) use.region_ = std::move(region);
    return use;
  }
  explicit operator bool() const { return region_ != nullptr; }
  Region* operator->() const { return region_.get(); }
  const Region* get() const { return region_.get(); }
  void release() {
    if (region_) region_->end_use();
    region_.reset();
  }

 private:
  std::shared_ptr<Region> region_;
};

// The regions peers may address, by the id that travels in descriptors.
class RegionTable {
 public:
  // False when the id is taken.
  bool add(const std::shared_ptr<Region>& region);
  void remove(uint64_t id);
  // A use of the region for a request, or why there is none.
  Refusal admit(const Header& request, RegionUse* use) const;

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> regions_;
};

}  // namespace mooncake_tcp
