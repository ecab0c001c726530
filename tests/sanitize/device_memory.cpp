#include "device_memory.hpp"

#include <dlfcn.h>

#include <string>

#include "failing.hpp"

namespace sanitized {
namespace {

constexpr unsigned kAttachGlobal = 1;  // CU_MEM_ATTACH_GLOBAL
constexpr int kHugeOnly = 1;           // ACL_MEM_MALLOC_HUGE_ONLY, which HCCS asks for

// The drivers load the same libraries: their state is one in the process.
void* library(const char* path) {
  void* found = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  require(found != nullptr, std::string("cannot load ") + path);
  return found;
}

template <class Function>
Function* function(void* library, const char* name) {
  void* found = dlsym(library, name);
  require(found != nullptr, std::string("there is no ") + name);
  return reinterpret_cast<Function*>(found);
}

template <class... Parameters, class... Arguments>
void call(void* library, const char* name, int (*)(Parameters...), Arguments... arguments) {
  int result = function<int(Parameters...)>(library, name)(arguments...);
  require(result == 0, std::string(name) + " fails with " + std::to_string(result));
}

// The primary context of GPU 0, current while this lives.
class CudaContext {
 public:
  CudaContext() {
    static void* const context = retain();
    run<void*>("cuCtxPushCurrent_v2", context);
  }
  ~CudaContext() { run<void**>("cuCtxPopCurrent_v2", nullptr); }

  template <class... Parameters>
  static void run(const char* name, Parameters... arguments) {
    call(cuda(), name, static_cast<int (*)(Parameters...)>(nullptr), arguments...);
  }
  static void* cuda() {
    static void* const loaded = library(CUDA_DOUBLE);
    return loaded;
  }

 private:
  static void* retain() {
    void* context = nullptr;
    run<unsigned>("cuInit", 0);
    run<void**, int>("cuDevicePrimaryCtxRetain", &context, 0);
    return context;
  }
};

DeviceMemory allocate_cuda(bool managed, size_t size) {
  CudaContext context;
  unsigned long long address = 0;
  if (managed)
    context.run<unsigned long long*, size_t, unsigned>("cuMemAllocManaged", &address, size, kAttachGlobal);
  else
    context.run<unsigned long long*, size_t>("cuMemAlloc_v2", &address, size);
  auto* bytes = function<void*(unsigned long long)>(context.cuda(), "cuda_double_bytes")(address);
  return {address, static_cast<char*>(bytes), [address] {
            CudaContext current;
            current.run<unsigned long long>("cuMemFree_v2", address);
          }};
}

void* acl() {
  static void* const loaded = library(ACL_DOUBLE);
  return loaded;
}

DeviceMemory allocate_npu(size_t size) {
  void* address = nullptr;
  call(acl(), "aclrtSetDevice", static_cast<int (*)(int32_t)>(nullptr), 0);
  call(acl(), "aclrtMalloc", static_cast<int (*)(void**, size_t, int)>(nullptr), &address, size, kHugeOnly);
  return {reinterpret_cast<uint64_t>(address), static_cast<char*>(address),
          [address] { call(acl(), "aclrtFree", static_cast<int (*)(void*)>(nullptr), address); }};
}

}  // namespace

DeviceMemory allocate_on_device(MemoryType type, size_t size) {
  if (type == MemoryType::kNpu) return allocate_npu(size);
  return allocate_cuda(type == MemoryType::kCudaManaged, size);
}

void check_rules_of_doubles() {
  char broken[200] = "";
  function<int(char*, size_t)>(CudaContext::cuda(), "cuda_double_violations")(broken, sizeof broken);
  std::string of_acl = function<const char*()>(acl(), "acl_double_violation")();
  require(broken[0] == 0, broken);
  require(of_acl.empty(), of_acl);
}

}  // namespace sanitized
