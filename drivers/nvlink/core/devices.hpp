// The GPUs of this process as one endpoint uses them: contexts, streams, events, access between GPUs.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <utility>
#include <vector>

#include "library.hpp"

namespace mooncake::nvlink {

constexpr int kHost = -1;     // the place of main memory
constexpr int kUnknown = -2;  // a GPU that this process does not see

class Device {
 public:
  Device(const Cuda& cuda, CUdevice device) : cuda_(cuda), device_(device) {}

  CUdevice number() const { return device_; }
  // The primary context, which other users of the GPU in this process (torch) share. Kept from the first use
  // until close().
  Status context(CUcontext& context);
  // An event that is recorded nowhere; the context must be current.
  Status take_event(CUevent& event);
  void give_event(CUevent event);
  void close();

 private:
  const Cuda& cuda_;
  const CUdevice device_;
  std::mutex mutex_;
  CUcontext context_ = nullptr;
  std::vector<CUevent> events_;
};

// Thread-safe.
class Devices {
 public:
  explicit Devices(const Cuda& cuda);
  void close();

  const Cuda& cuda() const { return cuda_; }
  int count() const { return static_cast<int>(devices_.size()); }
  Device& at(int device) { return *devices_[static_cast<size_t>(device)]; }
  bool known(int device) const { return device >= 0 && device < count(); }
  // kUnknown for a GPU that this process does not see.
  int find(const CUuuid& uuid) const;
  Status uuid(int device, CUuuid& uuid) const;
  bool has(int device, int attribute) const;
  bool all_have(int attribute) const;
  // Whether `from` reaches memory of `to` by itself; switches that on where it can be.
  bool reaches(int from, int to);

 private:
  const Cuda& cuda_;
  std::vector<std::unique_ptr<Device>> devices_;
  std::mutex mutex_;
  std::set<std::pair<int, int>> reaching_, not_reaching_;
};

}  // namespace mooncake::nvlink
