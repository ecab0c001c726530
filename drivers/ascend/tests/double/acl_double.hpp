// What the doubles of libascendcl and libcann_hixl know in common. Both are in one shared object of each
// name.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace acl_double {

struct Allocation {
  uint64_t bytes;
  void* mapped;
  uint64_t mapped_bytes;
};

struct Copy {
  void* stream;
  void* to;
  const void* from;
  uint64_t bytes;
};

struct State {
  std::mutex mutex;
  bool initialised = false;
  std::map<uint64_t, Allocation> memory;         // of devices
  std::map<uint64_t, uint64_t> pinned;           // of aclrtMallocHost: begin to end
  std::multimap<uint64_t, uint64_t> registered;  // with HIXL: begin to end
  std::vector<Copy> queued;                      // in streams
  std::map<std::string, long> controls;          // see acl_double_set
  std::map<std::string, long> counts;            // see acl_double_count
  const char* violations = "";
};

__attribute__((visibility("default"))) State& state();
__attribute__((visibility("default"))) int& current_device();
__attribute__((visibility("default"))) bool on_device(uint64_t address, uint64_t length);
__attribute__((visibility("default"))) bool is_pinned(uint64_t address, uint64_t length);
// Whether a test has named this call by the control: 1 is the next one. With the mutex.
__attribute__((visibility("default"))) bool due(const char* control);

}  // namespace acl_double

#define ACL_DOUBLE_API extern "C" __attribute__((visibility("default"))) int
