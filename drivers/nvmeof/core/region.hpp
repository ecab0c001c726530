// Registered memory, files and devices, and who may use them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "device.hpp"
#include "os.hpp"
#include "support/cuda.hpp"
#include "support/keys.hpp"

namespace mooncake::nvmeof {

using driver::Key;

// What runs under one key of a region. Entering and leaving take no lock.
class Uses {
 public:
  explicit Uses(uint32_t access) : access(access) {}
  const uint32_t access;

  // False once it was revoked.
  bool enter() {
    running_.fetch_add(1);
    if (!revoked_.load()) return true;
    running_.fetch_sub(1);
    return false;
  }
  void leave() { running_.fetch_sub(1); }
  void revoke() { revoked_.store(true); }
  bool idle() const { return running_.load() == 0; }

 private:
  std::atomic<uint64_t> running_{0};
  std::atomic<bool> revoked_{false};
};

// Lockable memory of an engine is registered with the ring piece by piece, when it is first used.
struct BufferSlots {
  static constexpr uint64_t kSpan = 64 << 20;
  static constexpr int kUntried = -1, kNone = -2;
  std::vector<int> slots;  // guarded by the mutex of Io
};

// Where a region of GPU memory lies, for cuFile.
struct GpuPlace {
  driver::cuda::CUcontext context = nullptr;
  int device = 0;
  bool pinned = false;
};

class Region {
 public:
  Region(uint64_t id, const uint8_t* key, uint64_t length) : id(id), length(length), keys_(key) {}

  const uint64_t id;
  const uint64_t length;
  std::byte* memory = nullptr;  // main memory or a GPU's; null: it lies on `device`
  bool on_gpu = false;
  std::shared_ptr<Device> device;
  uint64_t device_offset = 0;
  BufferSlots buffers;
  GpuPlace gpu;
  std::shared_ptr<struct Lent> lent;  // what other processes may ask for; null: nothing

  // The uses under a peer's key; null for a wrong or revoked one.
  std::shared_ptr<Uses> open(const Key& key);
  Status grant(const uint8_t* key, uint32_t access);
  // New operations are refused at once; null: those under any key. `out`: what may still run.
  Status revoke(const uint8_t* key, std::vector<std::shared_ptr<Uses>>& out);

 private:
  std::mutex mutex_;
  driver::KeyRing keys_;
  std::map<Key, std::shared_ptr<Uses>> uses_;
};

// The regions of one endpoint, as other endpoints of the process find them. Thread-safe.
class Owner {
 public:
  Status add(const std::shared_ptr<Region>& region);
  void remove(uint64_t region_id);
  std::shared_ptr<Region> find(uint64_t region_id);
  bool closed() const { return closed_.load(); }
  // How long failed writes to any of its regions may still be applied.
  uint64_t late_ns();
  // Withdraws every region; returns those that hold something of devices or GPUs.
  std::vector<std::shared_ptr<Region>> close(std::vector<std::shared_ptr<Uses>>& out);

 private:
  std::atomic<bool> closed_{false};
  std::mutex mutex_;
  std::unordered_map<uint64_t, std::shared_ptr<Region>> regions_;
};

}  // namespace mooncake::nvmeof
