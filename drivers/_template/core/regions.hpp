// Memory that the engine registered, and who is using it.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "mooncake_driver.h"
#include "wire.hpp"

namespace template_driver {

struct Region;
struct Grant;

// Thread-safe. A region that is being used cannot be taken away: deregistering waits for it.
class Regions {
 public:
  // Permission to touch a region, as long as this object lives.
  class Use {
   public:
    Use() = default;
    Use(Use&& other) noexcept
        : regions_(other.regions_), region_(std::exchange(other.region_, nullptr)), key_(other.key_) {}
    Use& operator=(Use&& other) noexcept {
      std::swap(regions_, other.regions_);
      std::swap(region_, other.region_);
      std::swap(key_, other.key_);
      return *this;
    }
    ~Use();

    explicit operator bool() const { return region_ != nullptr; }
    // The first byte at an offset. Only for ranges that were checked.
    char* at(uint64_t offset) const;

   private:
    friend class Regions;
    Regions* regions_ = nullptr;
    std::shared_ptr<Region> region_;
    Grant* key_ = nullptr;  // the key that a peer used; null for this side's own operations
  };

  // Real hardware: pin the memory and hand it to the device here (ibv_reg_mr and its like).
  Status add(const mc_memory& memory, std::shared_ptr<Region>* region);
  Status remove(const std::shared_ptr<Region>& region, uint64_t deadline_ns);

  // A key with lesser rights (mc_access bits). Real hardware: a second registration of the same memory with
  // fewer rights (another ibv_reg_mr), or a memory window.
  Status grant(Region& region, const uint8_t* key, uint32_t access);
  // Refuses a key from now on, or every key where it is null, and waits for operations under it until the
  // deadline; 0 does not wait.
  Status revoke(Region& region, const uint8_t* key, uint64_t deadline_ns);

  // For an operation of this side.
  Status use(const std::shared_ptr<Region>& region, uint64_t offset, uint64_t length, Use* use);
  // For a peer's request: the check of key and range that no initiator can be trusted to make.
  Status admit(const Request& request, Use* use);

 private:
  Use begin(const std::shared_ptr<Region>& region, Grant* key);

  std::mutex mutex_;
  std::condition_variable unused_;
  std::map<uint64_t, std::shared_ptr<Region>> by_id_;
};

}  // namespace template_driver
