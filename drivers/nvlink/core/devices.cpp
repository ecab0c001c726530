#include "devices.hpp"

#include <cstring>

namespace mooncake::nvlink {

Status Device::context(CUcontext& context) {
  std::lock_guard lock(mutex_);
  if (context_ == nullptr) {
    Status status =
        cuda_.check(cuda_.cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain");
    if (!status.ok()) {
      context_ = nullptr;
      return status;
    }
  }
  context = context_;
  return {};
}

Status Device::take_event(CUevent& event) {
  {
    std::lock_guard lock(mutex_);
    if (!events_.empty()) {
      event = events_.back();
      events_.pop_back();
      return {};
    }
  }
  return cuda_.check(cuda_.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
}

void Device::give_event(CUevent event) {
  std::lock_guard lock(mutex_);
  events_.push_back(event);
}

void Device::close() {
  std::lock_guard lock(mutex_);
  if (context_ == nullptr) return;
  {
    Current current(cuda_, context_);
    for (CUevent event : events_) cuda_.cuEventDestroy(event);
  }
  events_.clear();
  cuda_.cuDevicePrimaryCtxRelease(device_);
  context_ = nullptr;
}

Devices::Devices(const Cuda& cuda) : cuda_(cuda) {
  for (int i = 0; i < cuda.devices; ++i) {
    CUdevice device = 0;
    if (cuda.cuDeviceGet(&device, i) != CUDA_SUCCESS) break;
    devices_.push_back(std::make_unique<Device>(cuda, device));
  }
}

void Devices::close() {
  for (auto& device : devices_) device->close();
}

Status Devices::uuid(int device, CUuuid& uuid) const {
  CUdevice number = devices_[static_cast<size_t>(device)]->number();
  return cuda_.check(cuda_.cuDeviceGetUuid(&uuid, number), "cuDeviceGetUuid");
}

int Devices::find(const CUuuid& wanted) const {
  for (int i = 0; i < count(); ++i) {
    CUuuid found{};
    if (uuid(i, found).ok() && std::memcmp(&found, &wanted, sizeof found) == 0) return i;
  }
  return kUnknown;
}

bool Devices::has(int device, int attribute) const {
  int value = 0;
  CUdevice number = devices_[static_cast<size_t>(device)]->number();
  return cuda_.cuDeviceGetAttribute(&value, attribute, number) == CUDA_SUCCESS && value != 0;
}

bool Devices::all_have(int attribute) const {
  for (int i = 0; i < count(); ++i) {
    if (!has(i, attribute)) return false;
  }
  return count() > 0;
}

bool Devices::reaches(int from, int to) {
  if (from == to) return true;
  if (!known(from) || !known(to)) return false;
  std::lock_guard lock(mutex_);
  if (reaching_.contains({from, to})) return true;
  if (not_reaching_.contains({from, to})) return false;
  int can = 0;
  CUcontext ours = nullptr, theirs = nullptr;
  bool enabled = cuda_.cuDeviceCanAccessPeer(&can, at(from).number(), at(to).number()) == CUDA_SUCCESS &&
                 can != 0 && at(from).context(ours).ok() && at(to).context(theirs).ok();
  if (enabled) {
    Current current(cuda_, ours);
    CUresult result = cuda_.cuCtxEnablePeerAccess(theirs, 0);
    enabled = result == CUDA_SUCCESS || result == CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
  }
  (enabled ? reaching_ : not_reaching_).insert({from, to});
  return enabled;
}

}  // namespace mooncake::nvlink
