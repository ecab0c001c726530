// libcuda of NVIDIA's driver, found at run time. Every driver that touches memory of GPUs begins with it;
// what one calls beyond this it adds itself. Declared here, so that no CUDA toolkit is needed to build; names
// and values are those of cuda.h, which NVIDIA keeps stable.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "library.hpp"
#include "os.hpp"
#include "status.hpp"

namespace mooncake::driver::cuda {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;

enum : CUresult {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
  CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
  CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
  CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_SYSTEM_NOT_READY = 802,
};

// A symbol with _v2 is what cuda.h makes of the plain name.
struct Cuda {
  CUresult (*cuInit)(unsigned) = nullptr;
  CUresult (*cuGetErrorName)(CUresult, const char**) = nullptr;
  CUresult (*cuGetErrorString)(CUresult, const char**) = nullptr;
  CUresult (*cuDeviceGetCount)(int*) = nullptr;
  CUresult (*cuDeviceGet)(CUdevice*, int) = nullptr;
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice) = nullptr;
  CUresult (*cuCtxPushCurrent)(CUcontext) = nullptr;
  CUresult (*cuCtxPopCurrent)(CUcontext*) = nullptr;
  int devices = 0;

  // Loads and initialises it; `path` may be empty: libcuda.so.1. MC_UNSUPPORTED says what is missing, of the
  // library with `remedy`.
  Status open(const std::string& path, const char* remedy, Library& library);
  // MC_OK, or what failed with CUDA's name and words for the error.
  Status check(CUresult result, const char* what) const;

 private:
  Status find_devices();
};

inline Status Cuda::open(const std::string& path, const char* remedy, Library& library) {
  Status status = library.open({path.empty() ? "libcuda.so.1" : path.c_str()}, remedy);
  auto need = [&](const char* symbol, auto* function) {
    if (status.ok()) status = library.require(symbol, function);
  };
  need("cuInit", &cuInit);
  need("cuGetErrorName", &cuGetErrorName);
  need("cuGetErrorString", &cuGetErrorString);
  need("cuDeviceGetCount", &cuDeviceGetCount);
  need("cuDeviceGet", &cuDeviceGet);
  need("cuDevicePrimaryCtxRetain", &cuDevicePrimaryCtxRetain);
  need("cuDevicePrimaryCtxRelease_v2", &cuDevicePrimaryCtxRelease);
  need("cuCtxPushCurrent_v2", &cuCtxPushCurrent);
  need("cuCtxPopCurrent_v2", &cuCtxPopCurrent);
  return status.ok() ? find_devices() : status;
}

inline Status Cuda::find_devices() {
  CUresult result = cuInit(0);
  if (result == CUDA_ERROR_NO_DEVICE)
    return failed(MC_UNSUPPORTED,
                  "libcuda finds no device; check nvidia-smi and CUDA_VISIBLE_DEVICES, and in a container "
                  "that /dev/nvidia* are there");
  if (Status status = check(result, "cuInit"); !status.ok())
    return failed(MC_UNSUPPORTED, status.reason +
                                      "; check nvidia-smi, the permissions of /dev/nvidia*, and that the "
                                      "kernel module is of the library's version");
  if (Status status = check(cuDeviceGetCount(&devices), "cuDeviceGetCount"); !status.ok())
    return failed(MC_UNSUPPORTED, status.reason + "; check nvidia-smi");
  if (devices > 0) return {};
  return failed(MC_UNSUPPORTED,
                "libcuda shows no device; check CUDA_VISIBLE_DEVICES, and with MIG on that it names "
                "a MIG instance");
}

inline Status Cuda::check(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* words = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  if (cuGetErrorString(result, &words) != CUDA_SUCCESS || words == nullptr) words = "";
  mc_status code = result == CUDA_ERROR_OUT_OF_MEMORY                                         ? MC_NO_MEMORY
                   : result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_NOT_PERMITTED ? MC_UNSUPPORTED
                                                                                              : MC_IO;
  std::string reason = std::string(what) + ": " + name + " (" + std::to_string(result) + ")";
  return failed(code, *words == 0 ? reason : reason + ", " + words);
}

// The one of this process by its path, loaded by the first call and never unloaded: hosts without a GPU never
// load it. `More` derives from Cuda and has load(path), by open() and what it needs beyond that.
template <class More>
Status load(const std::string& path, const More*& cuda) {
  struct Loaded {
    std::mutex mutex;
    std::map<std::string, std::unique_ptr<More>> by_path;
  };
  auto& [mutex, loaded] = of_this_process<Loaded>();
  std::lock_guard lock(mutex);
  auto& known = loaded[path];
  if (!known) {
    auto made = std::make_unique<More>();
    if (Status status = made->load(path); !status.ok()) return status;
    known = std::move(made);
  }
  cuda = known.get();
  return {};
}

// A context is current on this thread while it lives; the one before is current again afterwards.
class Current {
 public:
  Current(const Cuda& cuda, CUcontext context) : cuda_(cuda), pushed_(cuda.cuCtxPushCurrent(context) == 0) {}
  ~Current() {
    CUcontext popped;
    if (pushed_) cuda_.cuCtxPopCurrent(&popped);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  bool pushed() const { return pushed_; }

 private:
  const Cuda& cuda_;
  bool pushed_;
};

// The primary context of a device, which other users of the GPU in this process share; kept while this lives.
class PrimaryContext {
 public:
  PrimaryContext(const Cuda& cuda, CUdevice device)
      : cuda_(cuda),
        device_(device),
        status_(cuda.check(cuda.cuDevicePrimaryCtxRetain(&context_, device), "cuDevicePrimaryCtxRetain")) {
    if (!status_.ok()) context_ = nullptr;
  }
  ~PrimaryContext() {
    if (context_ != nullptr) cuda_.cuDevicePrimaryCtxRelease(device_);
  }
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;
  const Status& status() const { return status_; }
  CUcontext get() const { return context_; }

 private:
  const Cuda& cuda_;
  const CUdevice device_;
  CUcontext context_ = nullptr;
  Status status_;
};

}  // namespace mooncake::driver::cuda
