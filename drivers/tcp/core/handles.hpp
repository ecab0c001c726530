// Opaque handles of the C ABI, and what they stand for.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "mooncake_driver.h"

namespace mooncake_tcp {

template <typename T>
class HandleTable {
 public:
  mc_handle add(std::shared_ptr<T> object) {
    std::unique_lock lock(mutex_);
    mc_handle handle = next_++;
    objects_.emplace(handle, std::move(object));
    return handle;
  }
  // nullptr when there is no such handle.
  std::shared_ptr<T> find(mc_handle handle) const {
    std::shared_lock lock(mutex_);
    auto found = objects_.find(handle);
    return found == objects_.end() ? nullptr : found->second;
  }
  std::shared_ptr<T> remove(mc_handle handle) {
    std::unique_lock lock(mutex_);
    auto found = objects_.find(handle);
    if (found == objects_.end()) return nullptr;
    std::shared_ptr<T> object = std::move(found->second);
    objects_.erase(found);
    return object;
  }
  std::vector<std::shared_ptr<T>> all() const {
    std::shared_lock lock(mutex_);
    std::vector<std::shared_ptr<T>> found;
    for (const auto& [handle, object] : objects_) found.push_back(object);
    return found;
  }

 private:
  mutable std::shared_mutex mutex_;
  mc_handle next_ = 1;  // never used again, so a stale handle is found out
  std::unordered_map<mc_handle, std::shared_ptr<T>> objects_;
};

// find() for a run of operations that mostly name the same object.
template <typename T>
class CachedLookup {
 public:
  explicit CachedLookup(const HandleTable<T>& table) : table_(table) {}
  const std::shared_ptr<T>& find(mc_handle handle) {
    if (handle != last_ || !object_) {
      object_ = table_.find(handle);
      last_ = handle;
    }
    return object_;
  }

 private:
  const HandleTable<T>& table_;
  mc_handle last_ = 0;
  std::shared_ptr<T> object_;
};

}  // namespace mooncake_tcp
