// The part of cuFile (libcufile.so.0) that is used here, and CUDA. Declared here, so that the wheel is built
// without NVIDIA's headers and runs without its libraries.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <ctime>
#include <string>

#include "os.hpp"
#include "support/cuda.hpp"

namespace mooncake::nvmeof::cufile {

// CUfileOpError: those that are met here; functions that return sizes return them negative.
constexpr int kSuccess = 0;
constexpr int kDriverNotInitialized = 5001;
constexpr int kDirectNotSet = 5020;  // before 1.7 files had to be opened with O_DIRECT
constexpr int kDriverAlreadyOpen = 5026;

struct Error {  // CUfileError_t
  int32_t code;
  int32_t cuda;
};

struct Description {  // CUfileDescr_t
  int32_t type;
  union {
    int32_t fd;
    void* handle;
  };
  const void* file_system;
};
static_assert(sizeof(Description) == 24);
constexpr int32_t kOpaqueFd = 1;

struct Request {  // CUfileIOParams_t
  int32_t mode;
  void* base;
  off_t file_offset, base_offset;
  size_t size;
  void* handle;
  int32_t opcode;
  void* cookie;
};
static_assert(sizeof(Request) == 64);
constexpr int32_t kBatchMode = 1, kRead = 0, kWrite = 1;

struct Event {  // CUfileIOEvents_t
  void* cookie;
  int32_t status;
  size_t result;  // bytes, or an error as above
};
static_assert(sizeof(Event) == 24);
constexpr int32_t kCancelled = 0x08, kComplete = 0x10;
constexpr int32_t kOver =
    0x04 | kCancelled | kComplete | 0x20 | 0x40;  // invalid, cancelled, done, timed out, failed

struct Library : driver::cuda::Cuda {
  Error (*cuFileDriverOpen)() = nullptr;
  Error (*cuFileHandleRegister)(void**, Description*) = nullptr;
  void (*cuFileHandleDeregister)(void*) = nullptr;
  Error (*cuFileBufRegister)(const void*, size_t, int) = nullptr;
  Error (*cuFileBufDeregister)(const void*) = nullptr;
  ssize_t (*cuFileRead)(void*, void*, size_t, off_t, off_t) = nullptr;
  ssize_t (*cuFileWrite)(void*, const void*, size_t, off_t, off_t) = nullptr;

  // Since 1.6 (CUDA 12.0): all or none.
  Error (*cuFileBatchIOSetUp)(void**, unsigned) = nullptr;
  Error (*cuFileBatchIOSubmit)(void*, unsigned, Request*, unsigned) = nullptr;
  Error (*cuFileBatchIOGetStatus)(void*, unsigned, unsigned*, Event*, timespec*) = nullptr;
  Error (*cuFileBatchIOCancel)(void*) = nullptr;
  void (*cuFileBatchIODestroy)(void*) = nullptr;
  bool batches() const { return cuFileBatchIODestroy != nullptr; }

  // Loads both libraries and opens cuFile. MC_UNSUPPORTED says what is missing. For driver::cuda::load():
  // once in a process, and for good, as others in it may use cuFile too.
  Status load(const std::string& cuda);
};

// "cuFileHandleRegister: cuFile error 5008 (CUDA 0)"
std::string words(const char* what, Error error);

}  // namespace mooncake::nvmeof::cufile
