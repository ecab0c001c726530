// The engine's handles for objects of an endpoint.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <utility>

#include "mooncake_driver.h"

namespace mooncake::shm {

// Never 0 and never used twice in a process, so that a stale handle is found out instead of meaning something
// else.
inline mc_handle new_handle() {
  static std::atomic<mc_handle> next{1};
  return next.fetch_add(1, std::memory_order_relaxed);
}

// Thread-safe. Who holds what get() returned may go on using it after take().
template <class Object>
class HandleTable {
 public:
  mc_handle add(std::shared_ptr<Object> object) {
    mc_handle handle = new_handle();
    std::unique_lock lock(mutex_);
    objects_.emplace(handle, std::move(object));
    return handle;
  }

  std::shared_ptr<Object> get(mc_handle handle) const {
    std::shared_lock lock(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }

  std::shared_ptr<Object> take(mc_handle handle) {
    std::unique_lock lock(mutex_);
    auto node = objects_.extract(handle);
    return node.empty() ? nullptr : std::move(node.mapped());
  }

 private:
  mutable std::shared_mutex mutex_;
  std::unordered_map<mc_handle, std::shared_ptr<Object>> objects_;
};

}  // namespace mooncake::shm
