// What the doubles of libascendcl and libcann_hixl know in common. Both are in one shared object of each
// name.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

namespace acl_double {

struct Allocation {
  uint64_t bytes;
  void* mapped;
  uint64_t mapped_bytes;
};

struct State {
  std::mutex mutex;
  bool initialised = false;
  std::map<uint64_t, Allocation> memory;         // of devices
  std::multimap<uint64_t, uint64_t> registered;  // with HIXL: begin to end
  const char* violations = "";
};

__attribute__((visibility("default"))) State& state();
__attribute__((visibility("default"))) int& current_device();
__attribute__((visibility("default"))) bool on_device(uint64_t address, uint64_t length);

}  // namespace acl_double

#define ACL_DOUBLE_API extern "C" __attribute__((visibility("default"))) int
