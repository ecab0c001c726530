// The part of the ACL runtime (libascendcl) that this driver calls, and the shim over HIXL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "mooncake_driver_ascend/shim/shim.h"
#include "support/library.hpp"
#include "support/status.hpp"

namespace mooncake::ascend {

using driver::failed;
using driver::Status;

using aclError = int;
using aclrtStream = void*;
constexpr aclError kAclSuccess = 0;
constexpr aclError kAclRepeatInitialize = 100002;
constexpr aclError kAclNotSupported = 207000;
constexpr uint32_t kHixlSuccess = 0, kHixlNotConnected = 103902;
constexpr int kStreamComplete = 0;  // of aclrtStreamStatus

struct aclrtMemLocation {
  uint32_t id;
  int type;
};
struct aclrtMemcpyBatchAttr {
  aclrtMemLocation dstLoc;
  aclrtMemLocation srcLoc;
  uint8_t rsv[16];
};
struct aclrtPtrAttributes {
  aclrtMemLocation location;
  uint32_t pageSize;
  uint32_t rsv[4];
};
// Main memory that ACL has allocated is kLocationHost; other main memory has a number of its own.
enum : int { kLocationHost = 0, kLocationDevice = 1 };
enum : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };

#define MC_ACL_FUNCTIONS(X)                                                   \
  X(aclInit, (const char*))                                                   \
  X(aclrtGetDeviceCount, (uint32_t*))                                         \
  X(aclrtSetDevice, (int32_t))                                                \
  X(aclrtCreateStream, (aclrtStream*))                                        \
  X(aclrtDestroyStream, (aclrtStream))                                        \
  X(aclrtMemcpy, (void*, size_t, const void*, size_t, int))                   \
  X(aclrtMemcpyAsync, (void*, size_t, const void*, size_t, int, aclrtStream)) \
  X(aclrtStreamQuery, (aclrtStream, int*))                                    \
  X(aclrtSynchronizeStreamWithTimeout, (aclrtStream, int32_t))
// Those that copy since CANN 8.3.
#define MC_ACL_OPTIONAL_FUNCTIONS(X)                                                                  \
  X(aclrtPointerGetAttributes, (const void*, aclrtPtrAttributes*))                                    \
  X(aclrtMemcpyBatch,                                                                                 \
    (void**, size_t*, void**, size_t*, size_t, aclrtMemcpyBatchAttr*, size_t*, size_t, size_t*))      \
  X(aclrtMemcpyBatchAsync, (void**, size_t*, void**, size_t*, size_t, aclrtMemcpyBatchAttr*, size_t*, \
                            size_t, size_t*, aclrtStream))

struct Acl {
#define MC_DECLARE(name, parameters) aclError(*name) parameters = nullptr;
  MC_ACL_FUNCTIONS(MC_DECLARE)
  MC_ACL_OPTIONAL_FUNCTIONS(MC_DECLARE)
#undef MC_DECLARE
  const mc_ascend_shim* shim = nullptr;

  // MC_UNSUPPORTED says what is missing. `library` may be empty: libascendcl.so.
  static Status load(const std::string& library, const std::string& shim, Acl& acl);
};

// MC_OK, or what failed with the number.
Status check_acl(aclError result, const char* what);
Status check_hixl(uint32_t result, const char* what);

}  // namespace mooncake::ascend
