// A test double of libascendcl: devices, contexts, device memory, copies. Device memory is memory of this
// process; which is which is known, and checked.
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <set>

#include "acl_double.hpp"

namespace acl_double {

State& state() {
  static auto* state = new State;
  return *state;
}

int& current_device() {
  thread_local int device = -1;  // none is set
  return device;
}

// With the mutex.
bool on_device(uint64_t address, uint64_t length) {
  auto after = state().memory.upper_bound(address);
  if (after == state().memory.begin()) return false;
  auto found = std::prev(after);
  return address + length <= found->first + found->second.bytes;
}

}  // namespace acl_double

using namespace acl_double;

namespace {

constexpr int kInvalidParam = 107000, kContextNull = 107002, kNotInitialised = 100001;

int copy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  std::lock_guard lock(state().mutex);
  if (current_device() < 0) return kContextNull;
  bool to_device = on_device(reinterpret_cast<uint64_t>(to), bytes);
  bool from_device = on_device(reinterpret_cast<uint64_t>(from), bytes);
  bool right = (kind == 1 && to_device && !from_device) || (kind == 2 && !to_device && from_device) ||
               (kind == 3 && to_device && from_device);
  if (room < bytes || !right) return kInvalidParam;
  std::memcpy(to, from, bytes);
  return 0;
}

}  // namespace

ACL_DOUBLE_API aclInit(const char*) {
  std::lock_guard lock(state().mutex);
  return std::exchange(state().initialised, true) ? 100002 : 0;
}
ACL_DOUBLE_API aclrtGetDeviceCount(uint32_t* count) {
  std::lock_guard lock(state().mutex);
  *count = 2;
  return state().initialised ? 0 : kNotInitialised;
}
ACL_DOUBLE_API aclrtSetDevice(int32_t device) {
  if (device < 0 || device > 1) return kInvalidParam;
  current_device() = device;
  return 0;
}
ACL_DOUBLE_API aclrtGetCurrentContext(void** context) {
  *context = reinterpret_cast<void*>(static_cast<intptr_t>(current_device() + 1));
  return current_device() < 0 ? kContextNull : 0;
}
ACL_DOUBLE_API aclrtSetCurrentContext(void* context) {
  current_device() = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1;
  return 0;
}
ACL_DOUBLE_API aclrtMalloc(void** address, size_t bytes, int policy) {
  if (current_device() < 0) return kContextNull;
  uint64_t page = policy == 1 ? 2 << 20 : 4096;  // ACL_MEM_MALLOC_HUGE_ONLY
  uint64_t size = (bytes + page - 1) / page * page;
  // NPUs may have more memory than this host: what is never touched costs nothing.
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* base = mmap(nullptr, size + page, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (base == MAP_FAILED) return 207001;
  uint64_t aligned = (reinterpret_cast<uint64_t>(base) + page - 1) / page * page;
  std::lock_guard lock(state().mutex);
  state().memory[aligned] = {size, base, size + page};
  *address = reinterpret_cast<void*>(aligned);
  return 0;
}
ACL_DOUBLE_API aclrtFree(void* address) {
  std::lock_guard lock(state().mutex);
  auto found = state().memory.find(reinterpret_cast<uint64_t>(address));
  if (found == state().memory.end()) return kInvalidParam;
  for (const auto& [begin, end] : state().registered) {
    if (begin < found->first + found->second.bytes && end > found->first)
      state().violations = "device memory was freed while HIXL had it registered";
  }
  munmap(found->second.mapped, found->second.mapped_bytes);
  state().memory.erase(found);
  return 0;
}
ACL_DOUBLE_API aclrtCreateStream(void** stream) {
  if (current_device() < 0) return kContextNull;
  *stream = new int(current_device());
  return 0;
}
ACL_DOUBLE_API aclrtDestroyStream(void* stream) {
  delete static_cast<int*>(stream);
  return 0;
}
ACL_DOUBLE_API aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  return copy(to, room, from, bytes, kind);
}
ACL_DOUBLE_API aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, int kind,
                                void* stream) {
  if (stream == nullptr || kind != 3) return kInvalidParam;  // main memory would have to be aclrtMallocHost's
  return copy(to, room, from, bytes, kind);
}
ACL_DOUBLE_API aclrtSynchronizeStreamWithTimeout(void* stream, int32_t) {
  return stream == nullptr ? kInvalidParam : 0;
}

struct Location {
  uint32_t id;
  int type;
};
struct BatchAttribute {
  Location to, from;
  uint8_t reserved[16];
};
ACL_DOUBLE_API aclrtMemcpyBatch(void** to, size_t* rooms, void** from, size_t* sizes, size_t count,
                                BatchAttribute* attributes, size_t* firsts, size_t kinds, size_t* bad) {
  if (kinds != 1 || firsts[0] != 0 || attributes->to.type == attributes->from.type) return kInvalidParam;
  for (size_t i = 0; i < count; ++i) {
    int result = copy(to[i], rooms[i], from[i], sizes[i], attributes->to.type == 1 ? 1 : 2);
    if (result == 0) continue;
    *bad = i;
    return result;
  }
  return 0;
}

extern "C" __attribute__((visibility("default"))) const char* acl_double_violation() {
  std::lock_guard lock(state().mutex);
  return state().violations;
}
