// GPU memory that peers can map whole, for allocators that ask a function for memory: torch's pluggable one.
#pragma once

#include <cstddef>
#include <string>

#include "support/status.hpp"

namespace mooncake::nvlink {

// Loads the CUDA driver library that the functions below use; the first one stays. `path` may be empty.
driver::Status prepare_allocator(const std::string& path);
// Why the last allocation of this process failed; empty: none did.
std::string allocation_failure();

}  // namespace mooncake::nvlink

#define MC_EXPORT extern "C" __attribute__((visibility("default")))

// As torch.cuda.memory.CUDAPluggableAllocator calls them. Null when there is no memory.
MC_EXPORT void* mooncake_cuda_malloc(size_t nbytes, int device, void* stream);
MC_EXPORT void mooncake_cuda_free(void* memory, size_t nbytes, int device, void* stream);
