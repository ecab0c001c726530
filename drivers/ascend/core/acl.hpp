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
using aclrtContext = void*;
using aclrtStream = void*;
constexpr aclError kAclSuccess = 0;
constexpr aclError kAclRepeatInitialize = 100002;
constexpr aclError kAclNotSupported = 207000;

struct aclrtMemLocation {
  uint32_t id;
  int type;
};
struct aclrtMemcpyBatchAttr {
  aclrtMemLocation dstLoc;
  aclrtMemLocation srcLoc;
  uint8_t rsv[16];
};
enum : int { kLocationHost = 0, kLocationDevice = 1 };
enum : int { kHostToHost = 0, kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };

#define MC_ACL_FUNCTIONS(X)                                                   \
  X(aclInit, (const char*))                                                   \
  X(aclrtGetDeviceCount, (uint32_t*))                                         \
  X(aclrtSetDevice, (int32_t))                                                \
  X(aclrtGetCurrentContext, (aclrtContext*))                                  \
  X(aclrtSetCurrentContext, (aclrtContext))                                   \
  X(aclrtCreateStream, (aclrtStream*))                                        \
  X(aclrtDestroyStream, (aclrtStream))                                        \
  X(aclrtMemcpy, (void*, size_t, const void*, size_t, int))                   \
  X(aclrtMemcpyAsync, (void*, size_t, const void*, size_t, int, aclrtStream)) \
  X(aclrtSynchronizeStreamWithTimeout, (aclrtStream, int32_t))
// Since CANN 8.3.
#define MC_ACL_OPTIONAL_FUNCTIONS(X) \
  X(aclrtMemcpyBatch,                \
    (void**, size_t*, void**, size_t*, size_t, aclrtMemcpyBatchAttr*, size_t*, size_t, size_t*))

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
