// A test double of libascendcl: devices, contexts, device memory, copies. Device memory is memory of this
// process; which is which is known, and checked.
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>

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

bool is_pinned(uint64_t address, uint64_t length) {
  auto after = state().pinned.upper_bound(address);
  return after != state().pinned.begin() && address + length <= std::prev(after)->second;
}

bool due(const char* control) {
  long& left = state().controls[control];
  return left > 0 && --left == 0;
}

}  // namespace acl_double

using namespace acl_double;

namespace {

constexpr int kInvalidParam = 107000, kContextNull = 107002, kNotInitialised = 100001;

// With the mutex.
int check(void* to, size_t room, const void* from, size_t bytes, int kind) {
  if (current_device() < 0) return kContextNull;
  if (due("fail copy")) return kInvalidParam;
  bool to_device = on_device(reinterpret_cast<uint64_t>(to), bytes);
  bool from_device = on_device(reinterpret_cast<uint64_t>(from), bytes);
  bool right = (kind == 1 && to_device && !from_device) || (kind == 2 && !to_device && from_device) ||
               (kind == 3 && to_device && from_device);
  return room < bytes || !right ? kInvalidParam : 0;
}

int copy(void* to, size_t room, const void* from, size_t bytes, int kind) {
  std::lock_guard lock(state().mutex);
  int result = check(to, room, from, bytes, kind);
  if (result == 0) std::memcpy(to, from, bytes);
  return result;
}

// Main memory has to be aclrtMallocHost's.
int queue(void* to, size_t room, const void* from, size_t bytes, int kind, void* stream) {
  std::lock_guard lock(state().mutex);
  int result = stream == nullptr ? kInvalidParam : check(to, room, from, bytes, kind);
  if (result != 0) return result;
  const void* main_memory = kind == 1 ? from : to;
  if (kind != 3 && !is_pinned(reinterpret_cast<uint64_t>(main_memory), bytes)) return kInvalidParam;
  state().queued.push_back({stream, to, from, bytes});
  return 0;
}

// With the mutex. Whether the stream has nothing left to do.
bool work(void* stream) {
  if (state().controls["hold streams"] != 0)
    return std::none_of(state().queued.begin(), state().queued.end(),
                        [&](const Copy& copy) { return copy.stream == stream; });
  std::erase_if(state().queued, [&](const Copy& copy) {
    if (copy.stream != stream) return false;
    std::memcpy(copy.to, copy.from, copy.bytes);
    return true;
  });
  return true;
}

bool touches(const Copy& copy, uint64_t begin, uint64_t end) {
  auto inside = [&](const void* at) {
    auto address = reinterpret_cast<uint64_t>(at);
    return address < end && begin < address + copy.bytes;
  };
  return inside(copy.to) || inside(copy.from);
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
  for (const Copy& copy : state().queued) {
    if (touches(copy, found->first, found->first + found->second.bytes))
      state().violations = "device memory was freed while a stream copies it";
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
ACL_DOUBLE_API aclrtMallocHost(void** address, size_t bytes) {
  uint64_t size = (bytes + 4095) / 4096 * 4096;
  void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) return 207001;
  std::lock_guard lock(state().mutex);
  state().pinned[reinterpret_cast<uint64_t>(base)] = reinterpret_cast<uint64_t>(base) + size;
  *address = base;
  return 0;
}
ACL_DOUBLE_API aclrtFreeHost(void* address) {
  std::lock_guard lock(state().mutex);
  auto found = state().pinned.find(reinterpret_cast<uint64_t>(address));
  if (found == state().pinned.end()) return kInvalidParam;
  for (const auto& [begin, end] : state().registered) {
    if (begin < found->second && end > found->first)
      state().violations = "main memory was freed while HIXL had it registered";
  }
  munmap(address, found->second - found->first);
  state().pinned.erase(found);
  return 0;
}
struct PointerAttributes {
  uint32_t id;
  int type;
  uint32_t page_bytes;
  uint32_t reserved[4];
};
ACL_DOUBLE_API aclrtPointerGetAttributes(const void* address, PointerAttributes* about) {
  std::lock_guard lock(state().mutex);
  auto at = reinterpret_cast<uint64_t>(address);
  about->type = is_pinned(at, 1) ? 0 : on_device(at, 1) ? 1 : 2;
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
  return queue(to, room, from, bytes, kind, stream);
}
ACL_DOUBLE_API aclrtStreamQuery(void* stream, int* status) {
  std::lock_guard lock(state().mutex);
  *status = work(stream) ? 0 : 1;
  return 0;
}
ACL_DOUBLE_API aclrtSynchronizeStreamWithTimeout(void* stream, int32_t timeout_ms) {
  if (stream == nullptr) return kInvalidParam;
  for (; timeout_ms > 0; --timeout_ms) {
    {
      std::lock_guard lock(state().mutex);
      if (work(stream)) return 0;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return 507046;  // ACL_ERROR_RT_STREAM_SYNC_TIMEOUT
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
ACL_DOUBLE_API aclrtMemcpyBatchAsync(void** to, size_t* rooms, void** from, size_t* sizes, size_t count,
                                     BatchAttribute* attributes, size_t* firsts, size_t kinds, size_t* bad,
                                     void* stream) {
  if (kinds != 1 || firsts[0] != 0 || attributes->to.type == attributes->from.type) return kInvalidParam;
  for (size_t i = 0; i < count; ++i) {
    int result = queue(to[i], rooms[i], from[i], sizes[i], attributes->to.type == 1 ? 1 : 2, stream);
    if (result == 0) continue;
    *bad = i;
    return result;
  }
  std::lock_guard lock(state().mutex);
  ++state().counts["batches in streams"];
  return 0;
}

extern "C" __attribute__((visibility("default"))) const char* acl_double_violation() {
  std::lock_guard lock(state().mutex);
  return state().violations;
}

// How the calls that follow go on: "hold streams" keeps streams from working, "hold transfers" those of HIXL
// from ending; "fail copy" and "fail transfer" have the call of this number fail, "fail disconnect" so many.
extern "C" __attribute__((visibility("default"))) void acl_double_set(const char* control, long value) {
  std::lock_guard lock(state().mutex);
  state().controls[control] = value;
}

// "batches in streams" of aclrtMemcpyBatchAsync; "hccs", "rdma" and "pool": transfers of HIXL by their way.
extern "C" __attribute__((visibility("default"))) long acl_double_count(const char* what) {
  std::lock_guard lock(state().mutex);
  return state().counts[what];
}
