#include "library.hpp"

namespace mooncake::nvlink {

Status Cuda::load(const std::string& path) {
  driver::Library library;
  Status status =
      open(path, "install NVIDIA's driver (in a container: start it with the NVIDIA runtime, --gpus all)",
           library);
  if (!status.ok()) return status;
#define MC_REQUIRE(name, symbol, parameters) \
  if (status = library.require(symbol, &name); !status.ok()) return status;
  MC_CUDA_FUNCTIONS(MC_REQUIRE)
#undef MC_REQUIRE
#define MC_FIND(name, symbol, parameters) library.find(symbol, &name);
  MC_CUDA_OPTIONAL_FUNCTIONS(MC_FIND)
#undef MC_FIND
  int version = 0;
  if (status = check(cuDriverGetVersion(&version), "cuDriverGetVersion"); !status.ok()) return status;
  if (version >= kLeastVersion) return {};
  return failed(MC_UNSUPPORTED, "NVIDIA's driver supports CUDA " + std::to_string(version / 1000) + "." +
                                    std::to_string(version % 1000 / 10) +
                                    ", and 11.4 is needed; install driver 470 or newer");
}

}  // namespace mooncake::nvlink
