#include "cufile.hpp"

#include <memory>
#include <mutex>
#include <string>

#include "support/library.hpp"
#include "support/os.hpp"

namespace mooncake::nvmeof::cufile {
namespace {

constexpr const char* kCudaRemedy = "install NVIDIA's driver, or leave the option gpudirect off";
constexpr const char* kFileRemedy =
    "install GPUDirect Storage (package libcufile of the CUDA toolkit, or pip install nvidia-cufile and "
    "LD_LIBRARY_PATH), or leave the option gpudirect off";

// cuFile is asked last: on a machine without a GPU its own opening may not come back.
Status open_cuda(Library& all) {
  driver::Library cuda;
  Status status = cuda.open({"libcuda.so.1"}, kCudaRemedy);
  if (status.ok()) status = cuda.require("cuInit", &all.cuInit);
  if (status.ok()) status = cuda.require("cuDeviceGetCount", &all.cuDeviceGetCount);
  if (status.ok()) status = cuda.require("cuDeviceGet", &all.cuDeviceGet);
  if (status.ok()) status = cuda.require("cuDevicePrimaryCtxRetain", &all.cuDevicePrimaryCtxRetain);
  if (status.ok()) status = cuda.require("cuDevicePrimaryCtxRelease_v2", &all.cuDevicePrimaryCtxRelease);
  if (status.ok()) status = cuda.require("cuCtxPushCurrent_v2", &all.cuCtxPushCurrent);
  if (status.ok()) status = cuda.require("cuCtxPopCurrent_v2", &all.cuCtxPopCurrent);
  if (!status.ok()) return status;
  int devices = 0, error = all.cuInit(0);
  if (error == 0) error = all.cuDeviceGetCount(&devices);
  if (error == 0 && devices > 0) return {};
  return failed(MC_UNSUPPORTED, "libcuda finds no GPU (CUDA error " + std::to_string(error) +
                                    "); check nvidia-smi and CUDA_VISIBLE_DEVICES");
}

Status open_cufile(Library& all) {
  driver::Library file;
  Status status = file.open({"libcufile.so.0"}, kFileRemedy);
  if (status.ok()) status = file.require("cuFileDriverOpen", &all.cuFileDriverOpen);
  if (status.ok()) status = file.require("cuFileHandleRegister", &all.cuFileHandleRegister);
  if (status.ok()) status = file.require("cuFileHandleDeregister", &all.cuFileHandleDeregister);
  if (status.ok()) status = file.require("cuFileBufRegister", &all.cuFileBufRegister);
  if (status.ok()) status = file.require("cuFileBufDeregister", &all.cuFileBufDeregister);
  if (status.ok()) status = file.require("cuFileRead", &all.cuFileRead);
  if (status.ok()) status = file.require("cuFileWrite", &all.cuFileWrite);
  if (!status.ok()) return status;
  file.find("cuFileBatchIOSetUp", &all.cuFileBatchIOSetUp);
  file.find("cuFileBatchIOSubmit", &all.cuFileBatchIOSubmit);
  file.find("cuFileBatchIOGetStatus", &all.cuFileBatchIOGetStatus);
  file.find("cuFileBatchIOCancel", &all.cuFileBatchIOCancel);
  if (all.cuFileBatchIOSetUp && all.cuFileBatchIOSubmit && all.cuFileBatchIOGetStatus &&
      all.cuFileBatchIOCancel)
    file.find("cuFileBatchIODestroy", &all.cuFileBatchIODestroy);
  Error error = all.cuFileDriverOpen();
  if (error.code == kSuccess || error.code == kDriverAlreadyOpen) return {};
  std::string why = words("cuFileDriverOpen", error);
  if (error.code == kDriverNotInitialized)
    why += ": the kernel module nvidia-fs is not loaded; load it, or allow_compat_mode in cufile.json";
  return failed(MC_UNSUPPORTED, why);
}

struct Loaded {
  std::mutex mutex;
  const Library* library = nullptr;
};

}  // namespace

Status Library::load(const Library*& library) {
  auto& [mutex, loaded] = driver::of_this_process<Loaded>();
  std::lock_guard lock(mutex);
  if (loaded == nullptr) {
    auto made = std::make_unique<Library>();
    if (Status status = open_cuda(*made); !status.ok()) return status;
    if (Status status = open_cufile(*made); !status.ok()) return status;
    loaded = made.release();
  }
  library = loaded;
  return {};
}

std::string words(const char* what, Error error) {
  return std::string(what) + ": cuFile error " + std::to_string(error.code) + " (CUDA " +
         std::to_string(error.cuda) + ")";
}

}  // namespace mooncake::nvmeof::cufile
