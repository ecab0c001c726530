// The part of the CUDA driver API that this driver calls beyond support/cuda.hpp, as libcuda.so.1 exports it.
// The values and layouts are those of cuda.h, which NVIDIA keeps stable.
#pragma once

#include <cstddef>
#include <cstdint>

#include "support/cuda.hpp"

namespace mooncake::nvlink {

using namespace driver::cuda;  // CUDA's own names
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;
using CUmemGenericAllocationHandle = unsigned long long;

enum : int {
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED = 128,

  CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
  CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
  CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
  CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
  CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE = 10,
  CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
  CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
  CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19,

  CU_MEMORYTYPE_HOST = 1,
  CU_MEMORYTYPE_DEVICE = 2,

  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
  CU_MEM_HANDLE_TYPE_FABRIC = 8,
  CU_MEM_LOCATION_TYPE_DEVICE = 1,
  CU_MEM_ALLOCATION_TYPE_PINNED = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,

  CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
  CU_STREAM_NON_BLOCKING = 1,
  CU_EVENT_DISABLE_TIMING = 2,
  CU_MEMHOSTREGISTER_PORTABLE = 1,
  CU_MEMHOSTREGISTER_READ_ONLY = 8,
  CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS = 1,
};

constexpr size_t kIpcHandleBytes = 64;
struct CUipcMemHandle {
  char reserved[kIpcHandleBytes];
};
struct CUmemFabricHandle {
  unsigned char data[64];
};
struct CUuuid {
  char bytes[16];
};
struct CUmemLocation {
  int type;
  int id;
};
struct CUmemAccessDesc {
  CUmemLocation location;
  int flags;
};
struct CUmemAllocationProp {
  int type;
  int requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};
struct CUmemcpyAttributes {
  int srcAccessOrder;
  CUmemLocation srcLocHint;
  CUmemLocation dstLocHint;
  unsigned flags;
};
static_assert(sizeof(CUmemAllocationProp) == 32 && sizeof(CUmemcpyAttributes) == 24);

// Name and exported symbol of each; a symbol with _v2 is what cuda.h makes of the plain name. Those of the
// second list are null where the driver is older.
#define MC_CUDA_FUNCTIONS(X)                                                                               \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int*))                                                      \
  X(cuDeviceGetUuid, "cuDeviceGetUuid", (CUuuid*, CUdevice))                                               \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int*, int, CUdevice))                                   \
  X(cuDeviceCanAccessPeer, "cuDeviceCanAccessPeer", (int*, CUdevice, CUdevice))                            \
  X(cuCtxEnablePeerAccess, "cuCtxEnablePeerAccess", (CUcontext, unsigned))                                 \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                                              \
  X(cuStreamCreate, "cuStreamCreate", (CUstream*, unsigned))                                               \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream))                                                     \
  X(cuStreamWaitEvent, "cuStreamWaitEvent", (CUstream, CUevent, unsigned))                                 \
  X(cuStreamQuery, "cuStreamQuery", (CUstream))                                                            \
  X(cuStreamGetCtx, "cuStreamGetCtx", (CUstream, CUcontext*))                                              \
  X(cuEventCreate, "cuEventCreate", (CUevent*, unsigned))                                                  \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent))                                                        \
  X(cuEventRecord, "cuEventRecord", (CUevent, CUstream))                                                   \
  X(cuEventQuery, "cuEventQuery", (CUevent))                                                               \
  X(cuMemcpyAsync, "cuMemcpyAsync", (CUdeviceptr, CUdeviceptr, size_t, CUstream))                          \
  X(cuMemcpyPeerAsync, "cuMemcpyPeerAsync",                                                                \
    (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream))                                    \
  X(cuMemGetAddressRange, "cuMemGetAddressRange_v2", (CUdeviceptr*, size_t*, CUdeviceptr))                 \
  X(cuPointerGetAttribute, "cuPointerGetAttribute", (void*, int, CUdeviceptr))                             \
  X(cuMemHostRegister, "cuMemHostRegister_v2", (void*, size_t, unsigned))                                  \
  X(cuMemHostUnregister, "cuMemHostUnregister", (void*))                                                   \
  X(cuIpcGetMemHandle, "cuIpcGetMemHandle", (CUipcMemHandle*, CUdeviceptr))                                \
  X(cuIpcOpenMemHandle, "cuIpcOpenMemHandle_v2", (CUdeviceptr*, CUipcMemHandle, unsigned))                 \
  X(cuIpcCloseMemHandle, "cuIpcCloseMemHandle", (CUdeviceptr))                                             \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                                            \
    (CUdeviceptr*, size_t, size_t, CUdeviceptr, unsigned long long))                                       \
  X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr, size_t))                                           \
  X(cuMemCreate, "cuMemCreate",                                                                            \
    (CUmemGenericAllocationHandle*, size_t, const CUmemAllocationProp*, unsigned long long))               \
  X(cuMemMap, "cuMemMap", (CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)) \
  X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr, size_t))                                                       \
  X(cuMemSetAccess, "cuMemSetAccess", (CUdeviceptr, size_t, const CUmemAccessDesc*, size_t))               \
  X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle))                                          \
  X(cuMemRetainAllocationHandle, "cuMemRetainAllocationHandle", (CUmemGenericAllocationHandle*, void*))    \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                        \
    (size_t*, const CUmemAllocationProp*, int))                                                            \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                          \
    (void*, CUmemGenericAllocationHandle, int, unsigned long long))                                        \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                                      \
    (CUmemGenericAllocationHandle*, void*, int))

// The two shapes that one function has had: 12.8 reports the index of a failed copy, 13.0 no longer does.
#define MC_CUDA_OPTIONAL_FUNCTIONS(X)                                                                       \
  X(cuMemcpyBatchAsync_12, "cuMemcpyBatchAsync",                                                            \
    (CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, size_t*, CUstream)) \
  X(cuMemcpyBatchAsync_13, "cuMemcpyBatchAsync_v2",                                                         \
    (CUdeviceptr*, CUdeviceptr*, size_t*, size_t, CUmemcpyAttributes*, size_t*, size_t, CUstream))

}  // namespace mooncake::nvlink
