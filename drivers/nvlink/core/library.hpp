// libcuda with everything that this driver calls.
#pragma once

#include <string>

#include "cuda.hpp"
#include "support/status.hpp"

namespace mooncake::nvlink {

using driver::failed;
using driver::Status;

// CUDA 11.4: the first whose cuMemRetainAllocationHandle, mapping attributes and _v2 symbols are all there.
constexpr int kLeastVersion = 11040;

struct Cuda : driver::cuda::Cuda {
#define MC_DECLARE(name, symbol, parameters) CUresult(*name) parameters = nullptr;
  MC_CUDA_FUNCTIONS(MC_DECLARE)
  MC_CUDA_OPTIONAL_FUNCTIONS(MC_DECLARE)
#undef MC_DECLARE

  // MC_UNSUPPORTED says what is missing: the library, a newer driver, a device. For driver::cuda::load().
  Status load(const std::string& path);
};

}  // namespace mooncake::nvlink
