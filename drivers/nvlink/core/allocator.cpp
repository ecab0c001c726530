#include "allocator.hpp"

#include <map>
#include <mutex>
#include <utility>

#include "cuda.hpp"
#include "library.hpp"
#include "support/os.hpp"

namespace mooncake::nvlink {
namespace {

struct Allocations {
  std::mutex mutex;
  const Cuda* cuda = nullptr;
  std::map<CUdeviceptr, size_t> mapped;  // bytes by address
  std::string failure;
};

Allocations& allocations() { return driver::of_this_process<Allocations>(); }

// Fabric handles too where the machine has them; a descriptor does for peers of the host.
Status create(const Cuda& cuda, size_t bytes, CUmemAllocationProp about,
              CUmemGenericAllocationHandle* handle) {
  constexpr int kBoth = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
  for (int types : {kBoth, int{CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR}}) {
    about.requestedHandleTypes = types;
    CUresult result = cuda.cuMemCreate(handle, bytes, &about, 0);
    if (result == CUDA_SUCCESS || result == CUDA_ERROR_OUT_OF_MEMORY || types != kBoth)
      return cuda.check(result, "cuMemCreate");
  }
  return {};
}

// Makes it usable by every GPU that reaches it.
Status open_to_all(const Cuda& cuda, CUdeviceptr address, size_t bytes, int owner) {
  for (int device = 0; device < cuda.devices; ++device) {
    int reaches = device == owner;
    if (!reaches && cuda.cuDeviceCanAccessPeer(&reaches, device, owner) != CUDA_SUCCESS) continue;
    if (!reaches) continue;
    CUmemAccessDesc who{{CU_MEM_LOCATION_TYPE_DEVICE, device}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    Status status = cuda.check(cuda.cuMemSetAccess(address, bytes, &who, 1), "cuMemSetAccess");
    if (!status.ok() && device == owner) return status;
  }
  return {};
}

Status map(const Cuda& cuda, size_t bytes, int device, CUmemGenericAllocationHandle handle,
           CUdeviceptr* address) {
  Status status = cuda.check(cuda.cuMemAddressReserve(address, bytes, 0, 0, 0), "cuMemAddressReserve");
  if (!status.ok()) return status;
  status = cuda.check(cuda.cuMemMap(*address, bytes, 0, handle, 0), "cuMemMap");
  if (status.ok()) {
    status = open_to_all(cuda, *address, bytes, device);
    if (status.ok()) return {};
    cuda.cuMemUnmap(*address, bytes);
  }
  cuda.cuMemAddressFree(*address, bytes);
  return status;
}

Status allocate(const Cuda& cuda, size_t nbytes, int device, CUdeviceptr* address, size_t* bytes) {
  CUdevice number = 0;
  Status status = cuda.check(cuda.cuDeviceGet(&number, device), "cuDeviceGet");
  if (!status.ok()) return status;
  PrimaryContext context(cuda, number);
  if (!context.status().ok()) return context.status();
  Current current(cuda, context.get());
  CUmemAllocationProp about{};
  about.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  about.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  about.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  size_t unit = 0;
  status = cuda.check(cuda.cuMemGetAllocationGranularity(&unit, &about, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                      "cuMemGetAllocationGranularity");
  if (!status.ok()) return status;
  *bytes = (nbytes + unit - 1) / unit * unit;
  CUmemGenericAllocationHandle handle = 0;
  status = create(cuda, *bytes, about, &handle);
  if (!status.ok()) return status;
  status = map(cuda, *bytes, device, handle, address);
  cuda.cuMemRelease(handle);  // the mapping keeps it
  return status;
}

}  // namespace

Status prepare_allocator(const std::string& path) {
  Allocations& all = allocations();
  std::lock_guard lock(all.mutex);
  return all.cuda != nullptr ? Status{} : driver::cuda::load(path, all.cuda);
}

std::string allocation_failure() {
  std::lock_guard lock(allocations().mutex);
  return allocations().failure;
}

}  // namespace mooncake::nvlink

using namespace mooncake::nvlink;

void* mooncake_cuda_malloc(size_t nbytes, int device, void*) {
  auto& all = allocations();
  std::lock_guard lock(all.mutex);
  if (all.cuda == nullptr || nbytes == 0) return nullptr;
  CUdeviceptr address = 0;
  size_t bytes = 0;
  Status status = allocate(*all.cuda, nbytes, device, &address, &bytes);
  all.failure = status.reason;
  if (!status.ok()) return nullptr;
  all.mapped.emplace(address, bytes);
  return reinterpret_cast<void*>(address);
}

void mooncake_cuda_free(void* memory, size_t, int device, void*) {
  auto& all = allocations();
  std::lock_guard lock(all.mutex);
  auto found = all.mapped.find(reinterpret_cast<CUdeviceptr>(memory));
  if (found == all.mapped.end()) return;
  // As cudaFree does, which callers count on: what is queued may still use it.
  CUdevice number = 0;
  if (all.cuda->cuDeviceGet(&number, device) == CUDA_SUCCESS) {
    PrimaryContext context(*all.cuda, number);
    Current current(*all.cuda, context.get());
    if (current.pushed()) all.cuda->cuCtxSynchronize();
  }
  all.cuda->cuMemUnmap(found->first, found->second);
  all.cuda->cuMemAddressFree(found->first, found->second);
  all.mapped.erase(found);
}
