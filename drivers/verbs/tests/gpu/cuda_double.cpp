// A test double of libcuda: what it makes of memory for NICs. It keeps to the rules of
// cuMemGetHandleForAddressRange: a current context, whole pages, no flags, only what was allocated.
// Built with WITHOUT_DMA_BUF it is of before CUDA 11.7.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace {

constexpr int kSuccess = 0, kInvalidValue = 1, kInvalidContext = 201, kNotSupported = 801;
constexpr uint64_t kPage = 4096, kBytes = 16 << 20;

std::mutex mutex;
bool initialized = false, supported = true, exportable = true;
uint64_t base = 0;      // of the GPU's memory: the CPU cannot touch it there
char* bytes = nullptr;  // where tests look at it
int retained = 0;
thread_local int current = 0;
std::map<std::pair<uint64_t, size_t>, int> shared;
char primary = 0;

}  // namespace

#define API(name) extern "C" __attribute__((visibility("default"))) int name

API(cuInit)(unsigned flags) {
  std::lock_guard lock(mutex);
  if (flags != 0) return kInvalidValue;
  if (initialized) return kSuccess;
  base = reinterpret_cast<uint64_t>(
      mmap(nullptr, kBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  bytes = static_cast<char*>(
      mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  initialized = true;
  return kSuccess;
}
API(cuGetErrorName)(int error, const char** name) {
  *name = error == kInvalidValue     ? "CUDA_ERROR_INVALID_VALUE"
          : error == kInvalidContext ? "CUDA_ERROR_INVALID_CONTEXT"
          : error == kNotSupported   ? "CUDA_ERROR_NOT_SUPPORTED"
                                     : "CUDA_SUCCESS";
  return kSuccess;
}
API(cuGetErrorString)(int, const char** words) {
  *words = "";
  return kSuccess;
}
API(cuDeviceGetCount)(int* count) {
  *count = 1;
  return kSuccess;
}
API(cuDeviceGet)(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? kSuccess : kInvalidValue;
}
API(cuDeviceGetAttribute)(int* value, int attribute, int device) {
  *value = attribute == 124 && supported;
  return device == 0 ? kSuccess : kInvalidValue;
}
API(cuPointerGetAttribute)(void* value, int attribute, unsigned long long address) {
  if (!initialized || address < base || address >= base + kBytes) return kInvalidValue;
  if (attribute == 1) *static_cast<void**>(value) = nullptr;  // as of memory of no context
  if (attribute == 9) *static_cast<int*>(value) = 0;
  return attribute == 1 || attribute == 9 ? kSuccess : kInvalidValue;
}
API(cuDevicePrimaryCtxRetain)(void** context, int device) {
  std::lock_guard lock(mutex);
  if (device != 0) return kInvalidValue;
  ++retained;
  *context = &primary;
  return kSuccess;
}
API(cuDevicePrimaryCtxRelease_v2)(int) {
  std::lock_guard lock(mutex);
  return retained-- > 0 ? kSuccess : kInvalidContext;
}
API(cuCtxPushCurrent_v2)(void* context) {
  if (context != &primary) return kInvalidContext;
  ++current;
  return kSuccess;
}
API(cuCtxPopCurrent_v2)(void**) { return current-- > 0 ? kSuccess : kInvalidContext; }

#ifndef WITHOUT_DMA_BUF
// The part of memory that is asked for moves into a memfd of its own, whose first byte is then that part's.
API(cuMemGetHandleForAddressRange)
(void* handle, unsigned long long address, size_t size, int type, unsigned long long flags) {
  std::lock_guard lock(mutex);
  if (current == 0) return kInvalidContext;
  if (!supported) return kNotSupported;
  if (address % kPage != 0 || size % kPage != 0 || size == 0 || type != 1 || flags != 0) return kInvalidValue;
  if (!exportable || address < base || address + size > base + kBytes) return kInvalidValue;
  int& fd = shared.try_emplace({address, size}, -1).first->second;
  if (fd < 0) {
    char* part = bytes + (address - base);
    fd = memfd_create("dma-buf", 0);
    if (fd < 0 || pwrite(fd, part, size, 0) != static_cast<ssize_t>(size)) return kNotSupported;
    mmap(part, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
  }
  *static_cast<int*>(handle) = dup(fd);
  return kSuccess;
}
#endif

// For tests.
API(cuda_double_set)(int has_dma_buf, int may_be_exported) {
  supported = has_dma_buf != 0;
  exportable = may_be_exported != 0;
  return kSuccess;
}
API(cuda_double_left)() { return retained + current; }
extern "C" __attribute__((visibility("default"))) uint64_t cuda_double_memory() { return base; }
extern "C" __attribute__((visibility("default"))) char* cuda_double_bytes() { return bytes; }
