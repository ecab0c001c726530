// What stands between a C function of the ABI and a driver's C++: finding the endpoint, keeping exceptions
// in, and the reason of the last failure.
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "handles.hpp"
#include "mooncake_driver.h"
#include "os.hpp"
#include "status.hpp"

namespace mooncake::driver {

// For exported blobs: `*length` is the capacity on entry and the size on return.
inline Status copy_out(const void* bytes, size_t size, void* blob, size_t* length) {
  if (*length < size)
    return failed(MC_INVALID, "the buffer is smaller than " + std::to_string(size) + " bytes");
  std::memcpy(blob, bytes, size);
  *length = size;
  return {};
}

template <class Endpoint>
class Calls {
 protected:
  static HandleTable<Endpoint>& endpoints() { return of_this_process<HandleTable<Endpoint>>(); }

  static std::string& last_reason() {
    thread_local std::string reason;
    return reason;
  }

  // No exception may cross the ABI.
  template <class Body>
  static mc_status guarded(Body&& body) noexcept {
    try {
      Status status = body();
      if (!status.ok()) last_reason() = std::move(status.reason);
      return status.code;
    } catch (const std::bad_alloc&) {
      last_reason() = "out of memory";  // short enough to need none
      return MC_NO_MEMORY;
    } catch (const std::exception& error) {
      try {
        last_reason() = error.what();
      } catch (...) {  // no memory for the words either
        last_reason().clear();
      }
      return MC_IO;
    }
  }

  // The pointer holds until close(), which by contract no call overlaps.
  static Status find(mc_handle handle, Endpoint*& endpoint) {
    const std::shared_ptr<Endpoint>* found = endpoints().find(handle);
    if (found == nullptr && fork_generation() > 1)
      return failed(
          MC_CLOSED,
          "no endpoint of this forked process has this handle; if it is the parent's, open one here");
    if (found == nullptr) return failed(MC_INVALID, "no endpoint has this handle");
    endpoint = found->get();
    return {};
  }

  template <class Body>
  static mc_status with(mc_handle handle, Body&& body) noexcept {
    return guarded([&] {
      Endpoint* endpoint = nullptr;
      if (Status status = find(handle, endpoint); !status.ok()) return status;
      return body(*endpoint);
    });
  }

  static Status missing(const char* what) {
    return failed(MC_INVALID, std::string("argument ") + what + " is null");
  }
};

}  // namespace mooncake::driver
