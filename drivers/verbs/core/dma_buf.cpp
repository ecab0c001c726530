#include "dma_buf.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <optional>
#include <string>

#include "support/cuda.hpp"

namespace mooncake::verbs {
namespace {

using driver::failed;
using driver::Status;

using namespace driver::cuda;  // CUDA's own names
constexpr int kContextOfPointer = 1, kDeviceOfPointer = 9, kDmaBufSupported = 124, kDmaBufFd = 1;

constexpr const char* kNoLibrary = "install NVIDIA's driver, 515 or newer (CUDA 11.7)";
constexpr const char* kNoDmaBuf =
    "it needs NVIDIA's open kernel modules, 515 or newer, a GPU that they serve (Turing or newer) and Linux "
    "5.12 or newer; without them use a host buffer";
constexpr const char* kNotExportable =
    "only memory of cudaMalloc, and mappings of one device without gaps, can be a DMA-BUF: neither managed "
    "memory nor that of cudaMallocAsync; copy it to such memory";

struct DmaBufs : Cuda {
  CUresult (*cuDeviceGetAttribute)(int*, int, CUdevice) = nullptr;
  CUresult (*cuPointerGetAttribute)(void*, int, CUdeviceptr) = nullptr;
  CUresult (*cuMemGetHandleForAddressRange)(void*, CUdeviceptr, size_t, int, unsigned long long) = nullptr;

  Status load(const std::string& path) {
    driver::Library library;
    Status status = open(path, kNoLibrary, library);
    auto need = [&](const char* symbol, auto* function) {
      if (status.ok()) status = library.require(symbol, function);
    };
    need("cuDeviceGetAttribute", &cuDeviceGetAttribute);
    need("cuPointerGetAttribute", &cuPointerGetAttribute);
    need("cuMemGetHandleForAddressRange", &cuMemGetHandleForAddressRange);  // since CUDA 11.7
    return status;
  }
  Status unless(CUresult result, const char* what, const char* remedy) const {
    Status status = check(result, what);
    return status.ok() ? status : failed(MC_UNSUPPORTED, status.reason + "; " + remedy);
  }
};

// The context that memory belongs to, current in this thread while this lives. Memory of virtual memory
// management belongs to none: any of its device does.
class ContextOf {
 public:
  ContextOf(const DmaBufs& cuda, CUdevice device, CUdeviceptr address) {
    CUcontext own = nullptr;
    if (cuda.cuPointerGetAttribute(&own, kContextOfPointer, address) != CUDA_SUCCESS || own == nullptr)
      own = primary_.emplace(cuda, device).get();
    current_.emplace(cuda, own);
  }

 private:
  std::optional<PrimaryContext> primary_;
  std::optional<Current> current_;  // ends first
};

}  // namespace

Status dma_buf_of(uint64_t address, uint64_t length, int& fd, uint64_t& offset) {
  const DmaBufs* cuda = nullptr;
  if (Status status = driver::cuda::load("", cuda); !status.ok())
    return failed(status.code, "memory of a GPU is registered as a DMA-BUF of CUDA: " + status.reason);
  CUdevice device = 0;
  Status status = cuda->unless(cuda->cuPointerGetAttribute(&device, kDeviceOfPointer, address),
                               "cuPointerGetAttribute of the memory", "pass memory of a GPU of this process");
  if (!status.ok()) return status;
  int supported = 0;
  status = cuda->unless(cuda->cuDeviceGetAttribute(&supported, kDmaBufSupported, device),
                        "cuDeviceGetAttribute of DMA-BUF support", kNoDmaBuf);
  if (!status.ok()) return status;
  if (supported == 0)
    return failed(MC_UNSUPPORTED,
                  "CUDA makes no DMA-BUF of memory of device " + std::to_string(device) + ": " + kNoDmaBuf);
  // CUDA takes whole pages of the host. What is beside the memory in them is not registered.
  auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t begin = address / page * page;
  uint64_t end = (address + length + page - 1) / page * page;
  ContextOf current(*cuda, device, address);
  int made = -1;
  // No flags: a mapping through PCIe's BAR is only for mlx5dv_reg_dmabuf_mr with a data direct engine.
  CUresult result = cuda->cuMemGetHandleForAddressRange(&made, begin, end - begin, kDmaBufFd, 0);
  std::string what = "cuMemGetHandleForAddressRange of " + std::to_string(length) + " bytes of device " +
                     std::to_string(device);
  const char* remedy = result == CUDA_ERROR_INVALID_VALUE   ? kNotExportable
                       : result == CUDA_ERROR_NOT_SUPPORTED ? kNoDmaBuf
                                                            : "see what CUDA says of this error";
  if (status = cuda->unless(result, what.c_str(), remedy); !status.ok()) return status;
  fcntl(made, F_SETFD, FD_CLOEXEC);
  fd = made;
  offset = address - begin;
  return {};
}

}  // namespace mooncake::verbs
