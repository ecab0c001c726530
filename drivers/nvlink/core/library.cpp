#include "library.hpp"

#include <map>
#include <memory>
#include <mutex>

#include "support/os.hpp"

namespace mooncake::nvlink {
namespace {

constexpr const char* kRemedy =
    "install NVIDIA's driver (in a container: start it with the NVIDIA runtime, --gpus all)";

Status open(const std::string& path, Cuda& cuda) {
  driver::Library library;
  if (Status status = library.open({path.empty() ? "libcuda.so.1" : path.c_str()}, kRemedy); !status.ok())
    return status;
#define MC_REQUIRE(name, symbol, parameters) \
  if (Status status = library.require(symbol, &cuda.name); !status.ok()) return status;
  MC_CUDA_FUNCTIONS(MC_REQUIRE)
#undef MC_REQUIRE
#define MC_FIND(name, symbol, parameters) library.find(symbol, &cuda.name);
  MC_CUDA_OPTIONAL_FUNCTIONS(MC_FIND)
#undef MC_FIND
  CUresult result = cuda.cuInit(0);
  if (result == CUDA_ERROR_NO_DEVICE)
    return failed(MC_UNSUPPORTED,
                  "libcuda finds no device; check nvidia-smi and CUDA_VISIBLE_DEVICES, and in a container "
                  "that /dev/nvidia* are there");
  if (Status status = cuda.check(result, "cuInit"); !status.ok())
    return failed(MC_UNSUPPORTED, status.reason +
                                      "; check nvidia-smi, the permissions of /dev/nvidia*, and that the "
                                      "kernel module is of the library's version");
  if (Status status = cuda.check(cuda.cuDriverGetVersion(&cuda.version), "cuDriverGetVersion"); !status.ok())
    return status;
  if (cuda.version < kLeastVersion)
    return failed(MC_UNSUPPORTED, "NVIDIA's driver supports CUDA " + std::to_string(cuda.version / 1000) +
                                      "." + std::to_string(cuda.version % 1000 / 10) +
                                      ", and 11.4 is needed; install driver 470 or newer");
  if (Status status = cuda.check(cuda.cuDeviceGetCount(&cuda.devices), "cuDeviceGetCount"); !status.ok())
    return status;
  if (cuda.devices == 0)
    return failed(MC_UNSUPPORTED,
                  "libcuda shows no device; check CUDA_VISIBLE_DEVICES, and with MIG on that it names "
                  "a MIG instance");
  return {};
}

struct Loaded {
  std::mutex mutex;
  std::map<std::string, std::unique_ptr<Cuda>> by_path;
};

}  // namespace

Status Cuda::load(const std::string& path, const Cuda*& cuda) {
  auto& [mutex, loaded] = driver::of_this_process<Loaded>();
  std::lock_guard lock(mutex);
  auto& known = loaded[path];
  if (!known) {
    auto made = std::make_unique<Cuda>();
    if (Status status = open(path, *made); !status.ok()) return status;
    known = std::move(made);
  }
  cuda = known.get();
  return {};
}

Status Cuda::check(CUresult result, const char* what) const {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* words = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  if (cuGetErrorString(result, &words) != CUDA_SUCCESS || words == nullptr) words = "";
  mc_status code = result == CUDA_ERROR_OUT_OF_MEMORY                                         ? MC_NO_MEMORY
                   : result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_NOT_PERMITTED ? MC_UNSUPPORTED
                                                                                              : MC_IO;
  return failed(code, std::string(what) + ": " + name + " (" + std::to_string(result) + "), " + words);
}

}  // namespace mooncake::nvlink
