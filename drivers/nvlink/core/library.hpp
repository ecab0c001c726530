// libcuda, found at run time.
#pragma once

#include <string>

#include "cuda.hpp"
#include "support/library.hpp"
#include "support/status.hpp"

namespace mooncake::nvlink {

using driver::failed;
using driver::Status;

// CUDA 11.4: the first whose cuMemRetainAllocationHandle, mapping attributes and _v2 symbols are all there.
constexpr int kLeastVersion = 11040;

struct Cuda {
#define MC_DECLARE(name, symbol, parameters) CUresult(*name) parameters = nullptr;
  MC_CUDA_FUNCTIONS(MC_DECLARE)
  MC_CUDA_OPTIONAL_FUNCTIONS(MC_DECLARE)
#undef MC_DECLARE
  int version = 0;
  int devices = 0;

  // MC_UNSUPPORTED says what is missing: the library, a newer driver, a device. Loaded once per name; never
  // unloaded. `path` may be empty: libcuda.so.1.
  static Status load(const std::string& path, const Cuda*& cuda);

  // MC_OK, or what failed with CUDA's name and words for the error.
  Status check(CUresult result, const char* what) const;
};

}  // namespace mooncake::nvlink
