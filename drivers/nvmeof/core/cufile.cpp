#include "cufile.hpp"

#include <string>

#include "support/library.hpp"

namespace mooncake::nvmeof::cufile {
namespace {

constexpr const char* kCudaRemedy = "install NVIDIA's driver, or leave the option gpudirect off";
constexpr const char* kFileRemedy =
    "install GPUDirect Storage (package libcufile of the CUDA toolkit, or pip install nvidia-cufile and "
    "LD_LIBRARY_PATH), or leave the option gpudirect off";

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

}  // namespace

Status Library::load(const std::string& cuda) {
  driver::Library first;
  // cuFile is asked last: on a machine without a GPU its own opening may not come back.
  if (Status status = open(cuda, kCudaRemedy, first); !status.ok()) return status;
  return open_cufile(*this);
}

std::string words(const char* what, Error error) {
  return std::string(what) + ": cuFile error " + std::to_string(error.code) + " (CUDA " +
         std::to_string(error.cuda) + ")";
}

}  // namespace mooncake::nvmeof::cufile
