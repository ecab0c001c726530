#include "dma_buf.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <mutex>
#include <string>

#include "support/library.hpp"
#include "support/os.hpp"

namespace mooncake::verbs {
namespace {

using driver::failed;
using driver::Status;

// What is called of the CUDA driver API, as libcuda.so.1 exports it, with the values of cuda.h.
using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
constexpr CUresult kSuccess = 0, kInvalidValue = 1, kNotSupported = 801;
constexpr int kContextOfPointer = 1, kDeviceOfPointer = 9, kDmaBufSupported = 124, kDmaBufFd = 1;

constexpr const char* kNoLibrary = "install NVIDIA's driver, 515 or newer (CUDA 11.7)";
constexpr const char* kNoDmaBuf =
    "it needs NVIDIA's open kernel modules, 515 or newer, a GPU that they serve (Turing or newer) and Linux "
    "5.12 or newer; without them use a host buffer";
constexpr const char* kNotExportable =
    "only memory of cudaMalloc, and mappings of one device without gaps, can be a DMA-BUF: neither managed "
    "memory nor that of cudaMallocAsync; copy it to such memory";

struct Cuda {
  CUresult (*init)(unsigned) = nullptr;
  CUresult (*error_name)(CUresult, const char**) = nullptr;
  CUresult (*device_attribute)(int*, int, CUdevice) = nullptr;
  CUresult (*pointer_attribute)(void*, int, CUdeviceptr) = nullptr;
  CUresult (*retain)(CUcontext*, CUdevice) = nullptr;
  CUresult (*release)(CUdevice) = nullptr;
  CUresult (*push)(CUcontext) = nullptr;
  CUresult (*pop)(CUcontext*) = nullptr;
  CUresult (*handle_of_range)(void*, CUdeviceptr, size_t, int, unsigned long long) = nullptr;

  Status load() {
    driver::Library library;
    Status status = library.open({"libcuda.so.1"}, kNoLibrary);
    auto need = [&](const char* symbol, auto* function) {
      if (status.ok()) status = library.require(symbol, function);
    };
    need("cuInit", &init);
    need("cuGetErrorName", &error_name);
    need("cuDeviceGetAttribute", &device_attribute);
    need("cuPointerGetAttribute", &pointer_attribute);
    need("cuDevicePrimaryCtxRetain", &retain);
    need("cuDevicePrimaryCtxRelease_v2", &release);
    need("cuCtxPushCurrent_v2", &push);
    need("cuCtxPopCurrent_v2", &pop);
    need("cuMemGetHandleForAddressRange", &handle_of_range);  // since CUDA 11.7
    if (!status.ok()) return status;
    return check(init(0), "cuInit", "check nvidia-smi and the permissions of /dev/nvidia*");
  }

  Status check(CUresult result, const char* what, const char* remedy) const {
    if (result == kSuccess) return {};
    const char* name = nullptr;
    if (error_name(result, &name) != kSuccess || name == nullptr) name = "unknown error";
    return failed(MC_UNSUPPORTED,
                  std::string(what) + ": " + name + " (" + std::to_string(result) + "); " + remedy);
  }
};

struct Loaded {
  std::mutex mutex;
  const Cuda* cuda = nullptr;
};

// Hosts without a GPU never load it.
Status loaded(const Cuda** cuda) {
  auto& [mutex, known] = driver::of_this_process<Loaded>();
  std::lock_guard lock(mutex);
  if (known == nullptr) {
    Cuda made;
    if (Status status = made.load(); !status.ok()) return status;
    known = new Cuda(made);
  }
  *cuda = known;
  return {};
}

// The context that memory belongs to, current in this thread while this lives. Memory of virtual memory
// management belongs to none: any of its device does.
class Current {
 public:
  Current(const Cuda& cuda, CUdevice device, CUdeviceptr address) : cuda_(cuda), device_(device) {
    CUcontext context = nullptr;
    if (cuda.pointer_attribute(&context, kContextOfPointer, address) != kSuccess || context == nullptr)
      retained_ = cuda.retain(&context, device) == kSuccess;
    pushed_ = context != nullptr && cuda.push(context) == kSuccess;
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;
  ~Current() {
    if (pushed_) cuda_.pop(nullptr);
    if (retained_) cuda_.release(device_);
  }

 private:
  const Cuda& cuda_;
  const CUdevice device_;
  bool retained_ = false;
  bool pushed_ = false;
};

}  // namespace

Status dma_buf_of(uint64_t address, uint64_t length, int& fd, uint64_t& offset) {
  const Cuda* cuda = nullptr;
  if (Status status = loaded(&cuda); !status.ok())
    return failed(status.code, "memory of a GPU is registered as a DMA-BUF of CUDA: " + status.reason);
  CUdevice device = 0;
  Status status = cuda->check(cuda->pointer_attribute(&device, kDeviceOfPointer, address),
                              "cuPointerGetAttribute of the memory", "pass memory of a GPU of this process");
  if (!status.ok()) return status;
  int supported = 0;
  status = cuda->check(cuda->device_attribute(&supported, kDmaBufSupported, device),
                       "cuDeviceGetAttribute of DMA-BUF support", kNoDmaBuf);
  if (!status.ok()) return status;
  if (supported == 0)
    return failed(MC_UNSUPPORTED,
                  "CUDA makes no DMA-BUF of memory of device " + std::to_string(device) + ": " + kNoDmaBuf);
  // CUDA takes whole pages of the host. What is beside the memory in them is not registered.
  auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t begin = address / page * page;
  uint64_t end = (address + length + page - 1) / page * page;
  Current current(*cuda, device, address);
  int made = -1;
  // No flags: a mapping through PCIe's BAR is only for mlx5dv_reg_dmabuf_mr with a data direct engine.
  CUresult result = cuda->handle_of_range(&made, begin, end - begin, kDmaBufFd, 0);
  std::string what = "cuMemGetHandleForAddressRange of " + std::to_string(length) + " bytes of device " +
                     std::to_string(device);
  const char* remedy = result == kInvalidValue   ? kNotExportable
                       : result == kNotSupported ? kNoDmaBuf
                                                 : "see what CUDA says of this error";
  if (status = cuda->check(result, what.c_str(), remedy); !status.ok()) return status;
  fcntl(made, F_SETFD, FD_CLOEXEC);
  fd = made;
  offset = address - begin;
  return {};
}

}  // namespace mooncake::verbs
