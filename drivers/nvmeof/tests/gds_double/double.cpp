// A test double of libcufile and of what it needs of libcuda: it moves bytes between files and memory that
// the CPU cannot reach at its address, and enforces the rules of both. Found as libcuda.so.1 and
// libcufile.so.0.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cufile.hpp"

using namespace mooncake::nvmeof::cufile;

namespace {

constexpr int kNotOpen = 5001, kPointerInvalid = 5012, kPointerRange = 5014, kWrongContext = 5015;
constexpr int kInvalid = 5022, kBufferKnown = 5023, kBufferUnknown = 5024, kHandleUnknown = 5027;
constexpr int kHandleKnown = 5028, kInternal = 5030, kBatchFull = 5037;
constexpr uint64_t kBlock = 4096;

struct Allocation {
  char* shadow;
  size_t bytes;
};

struct Batch {
  bool cancelled = false;
  unsigned capacity = 0, running = 0;
  std::deque<Event> over;
  std::vector<std::thread> threads;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  bool initialised = false, open = false;
  int retained = 0;
  std::map<uint64_t, Allocation> memory;
  std::map<uint64_t, size_t> buffers;
  std::map<void*, int> handles;  // descriptors
  std::map<void*, int> in_use;   // handles and buffers of operations under way
  std::string violations;
  uint64_t singles = 0, batched = 0, cancels = 0;
  bool hanging = false;  // batches do not go on
  bool losing = false;   // the status of a batch is an error
  int failing = 0;       // of the next operation: an error of cuFile, or minus an errno
  size_t most = ~size_t{0};
};
State& state() {
  static auto* all = new State;
  return *all;
}
thread_local std::vector<void*> contexts;  // of the thread; the last is current
void* current() { return contexts.empty() ? nullptr : contexts.back(); }
int context;  // of device 0: its address

void violated(const std::string& rule) { state().violations += rule + "; "; }

// An O_DIRECT file is read and written in whole blocks, as the device does it.
ssize_t move_direct(int fd, char* memory, size_t size, off_t offset, bool write) {
  auto begin = static_cast<uint64_t>(offset) / kBlock * kBlock;
  auto end = (static_cast<uint64_t>(offset) + size + kBlock - 1) / kBlock * kBlock;
  struct stat status{};
  if (fstat(fd, &status) == 0 && S_ISREG(status.st_mode) && write &&
      end > static_cast<uint64_t>(status.st_size)) {
    std::lock_guard lock(state().mutex);
    violated("a write by O_DIRECT would make the file grow");
  }
  std::unique_ptr<char, decltype(&std::free)> bounce(
      static_cast<char*>(std::aligned_alloc(kBlock, end - begin)), &std::free);
  ssize_t got = 0;
  bool partial = begin != static_cast<uint64_t>(offset) || end != offset + size;
  if (!write || partial) got = pread(fd, bounce.get(), end - begin, static_cast<off_t>(begin));
  if (got < 0) return -1;
  size_t skip = static_cast<uint64_t>(offset) - begin;
  if (!write) {
    size_t usable = static_cast<size_t>(got) > skip ? std::min(size, static_cast<size_t>(got) - skip) : 0;
    std::memcpy(memory, bounce.get() + skip, usable);
    return static_cast<ssize_t>(usable);
  }
  std::memcpy(bounce.get() + skip, memory, size);
  if (pwrite(fd, bounce.get(), end - begin, static_cast<off_t>(begin)) < 0) return -1;
  return static_cast<ssize_t>(size);
}

ssize_t move(void* handle, uint64_t base, size_t size, off_t offset, off_t within, bool write, void* where) {
  State& all = state();
  std::unique_lock lock(all.mutex);
  if (!all.open) return -kNotOpen;
  auto file = all.handles.find(handle);
  if (file == all.handles.end()) return -kHandleUnknown;
  if (where != &context) return -kWrongContext;
  auto memory = all.memory.upper_bound(base);
  if (memory == all.memory.begin()) return -kPointerInvalid;
  --memory;
  uint64_t from = base - memory->first + static_cast<uint64_t>(within);
  if (base >= memory->first + memory->second.bytes) return -kPointerInvalid;
  if (from + size > memory->second.bytes) return -kPointerRange;
  for (auto& [start, bytes] : all.buffers) {
    if (base > start && base < start + bytes) violated("the base is inside a registered buffer");
  }
  if (all.failing != 0) {
    int code = std::exchange(all.failing, 0);
    errno = code < 0 ? -code : 0;
    return code < 0 ? -1 : -code;
  }
  int fd = file->second;
  ++all.in_use[handle];
  ++all.in_use[reinterpret_cast<void*>(base)];
  size = std::min(size, all.most);
  char* place = memory->second.shadow + from;
  lock.unlock();
  bool direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
  ssize_t moved = direct  ? move_direct(fd, place, size, offset, write)
                  : write ? pwrite(fd, place, size, offset)
                          : pread(fd, place, size, offset);
  int error = errno;
  lock.lock();
  --all.in_use[handle];
  --all.in_use[reinterpret_cast<void*>(base)];
  errno = error;
  return moved;
}

}  // namespace

#define DOUBLE_API extern "C" __attribute__((visibility("default")))

// ---------------------------------------------------------------------------------------------- libcuda

DOUBLE_API int cuInit(unsigned) {
  state().initialised = true;
  return 0;
}
DOUBLE_API int cuGetErrorName(int, const char** name) {
  *name = nullptr;
  return 1;
}
DOUBLE_API int cuGetErrorString(int, const char** words) {
  *words = nullptr;
  return 1;
}
DOUBLE_API int cuDeviceGetCount(int* count) {
  *count = 1;
  return state().initialised ? 0 : 3;
}
DOUBLE_API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : 101;
}
DOUBLE_API int cuDevicePrimaryCtxRetain(void** out, int) {
  ++state().retained;
  *out = &context;
  return 0;
}
DOUBLE_API int cuDevicePrimaryCtxRelease_v2(int) { return --state().retained < 0 ? 201 : 0; }
DOUBLE_API int cuCtxPushCurrent_v2(void* wanted) {
  contexts.push_back(wanted);
  return wanted == nullptr ? 1 : 0;
}
DOUBLE_API int cuCtxPopCurrent_v2(void** popped) {
  if (contexts.empty()) return 201;
  *popped = contexts.back();
  contexts.pop_back();
  return 0;
}

// ---------------------------------------------------------------------------------------------- libcufile

DOUBLE_API Error cuFileDriverOpen() {
  std::lock_guard lock(state().mutex);
  if (!state().initialised) return {5011, 3};
  if (std::getenv("GDS_DOUBLE_NO_MODULE") != nullptr) return {kNotOpen, 0};
  bool before = std::exchange(state().open, true);
  return {before ? kDriverAlreadyOpen : kSuccess, 0};
}

DOUBLE_API Error cuFileHandleRegister(void** handle, Description* description) {
  std::lock_guard lock(state().mutex);
  if (!state().open) return {kNotOpen, 0};
  if (description->type != kOpaqueFd || fcntl(description->fd, F_GETFL) < 0) return {kInvalid, 0};
  bool direct = (fcntl(description->fd, F_GETFL) & O_DIRECT) != 0;
  if (!direct && std::getenv("GDS_DOUBLE_OLD") != nullptr) return {kDirectNotSet, 0};
  for (auto& [known, fd] : state().handles) {
    if (fd == description->fd) return {kHandleKnown, 0};
  }
  *handle = new char;
  state().handles[*handle] = description->fd;
  return {kSuccess, 0};
}

DOUBLE_API void cuFileHandleDeregister(void* handle) {
  std::lock_guard lock(state().mutex);
  if (state().in_use[handle] != 0) violated("a handle was given back with operations under way");
  if (state().handles.erase(handle) == 0) violated("an unknown handle was given back");
}

DOUBLE_API Error cuFileBufRegister(const void* base, size_t length, int flags) {
  std::lock_guard lock(state().mutex);
  auto at = reinterpret_cast<uint64_t>(base);
  if (!state().open) return {kNotOpen, 0};
  if (flags != 0 || current() != &context) return {kWrongContext, 0};
  auto found = state().memory.upper_bound(at);
  if (found == state().memory.begin()) return {kPointerInvalid, 0};
  --found;
  if (at + length > found->first + found->second.bytes) return {kPointerRange, 0};
  if (std::getenv("GDS_DOUBLE_NO_WINDOW") != nullptr) return {5036, 0};
  if (!state().buffers.emplace(at, length).second) return {kBufferKnown, 0};
  return {kSuccess, 0};
}

DOUBLE_API Error cuFileBufDeregister(const void* base) {
  std::lock_guard lock(state().mutex);
  if (state().in_use[const_cast<void*>(base)] != 0) violated("a buffer was given back in use");
  bool known = state().buffers.erase(reinterpret_cast<uint64_t>(base)) != 0;
  return {known ? kSuccess : kBufferUnknown, 0};
}

DOUBLE_API ssize_t cuFileRead(void* handle, void* base, size_t size, off_t offset, off_t within) {
  ++state().singles;
  return move(handle, reinterpret_cast<uint64_t>(base), size, offset, within, false, current());
}

DOUBLE_API ssize_t cuFileWrite(void* handle, const void* base, size_t size, off_t offset, off_t within) {
  ++state().singles;
  return move(handle, reinterpret_cast<uint64_t>(base), size, offset, within, true, current());
}

#ifndef GDS_DOUBLE_WITHOUT_BATCHES
DOUBLE_API Error cuFileBatchIOSetUp(void** batch, unsigned capacity) {
  if (capacity > 128) return {kInvalid, 0};
  auto* made = new Batch;
  made->capacity = capacity;
  *batch = made;
  return {kSuccess, 0};
}

DOUBLE_API Error cuFileBatchIOSubmit(void* handle, unsigned count, Request* requests, unsigned flags) {
  auto* batch = static_cast<Batch*>(handle);
  std::lock_guard lock(state().mutex);
  if (flags != 0) return {kInvalid, 0};
  if (batch->running + count > batch->capacity) return {kBatchFull, 0};
  std::vector<Request> all(requests, requests + count);
  for (const Request& each : all) {
    bool aligned = each.file_offset % 4096 == 0 && each.base_offset % 4096 == 0 && each.size % 4096 == 0;
    if (!aligned || each.mode != kBatchMode) return {kInvalid, 0};
  }
  batch->running += count;
  state().batched += count;
  batch->threads.emplace_back([batch, all, where = current()] {
    for (const Request& each : all) {
      bool cancelled = false;
      {
        std::unique_lock lock(state().mutex);
        state().changed.wait(lock, [&] { return !state().hanging || batch->cancelled; });
        cancelled = batch->cancelled;
        if (cancelled) batch->over.push_back({each.cookie, kCancelled, 0});
      }
      if (cancelled) continue;
      ssize_t moved = move(each.handle, reinterpret_cast<uint64_t>(each.base), each.size, each.file_offset,
                           each.base_offset, each.opcode == kWrite, where);
      std::lock_guard lock(state().mutex);
      batch->over.push_back({each.cookie, moved < 0 ? 0x40 : kComplete, static_cast<size_t>(moved)});
      state().changed.notify_all();
    }
  });
  return {kSuccess, 0};
}

DOUBLE_API Error cuFileBatchIOGetStatus(void* handle, unsigned least, unsigned* count, Event* events,
                                        timespec* limit) {
  auto* batch = static_cast<Batch*>(handle);
  std::unique_lock lock(state().mutex);
  if (*count > batch->capacity) return {kInvalid, 0};
  if (state().losing) return {kInternal, 0};
  auto longest = std::chrono::seconds(limit->tv_sec) + std::chrono::nanoseconds(limit->tv_nsec);
  state().changed.wait_for(lock, longest, [&] { return batch->over.size() >= least; });
  *count = std::min<unsigned>(*count, static_cast<unsigned>(batch->over.size()));
  for (unsigned i = 0; i < *count; ++i) {
    events[i] = batch->over.front();
    batch->over.pop_front();
    --batch->running;
  }
  return {kSuccess, 0};
}

DOUBLE_API Error cuFileBatchIOCancel(void* handle) {
  std::lock_guard lock(state().mutex);
  static_cast<Batch*>(handle)->cancelled = true;
  ++state().cancels;
  state().changed.notify_all();
  return {kSuccess, 0};
}

DOUBLE_API void cuFileBatchIODestroy(void* handle) {
  auto* batch = static_cast<Batch*>(handle);
  {
    std::lock_guard lock(state().mutex);
    if (batch->running != 0 && !batch->cancelled)
      violated("a batch was given back with operations under way");
  }
  for (std::thread& thread : batch->threads) thread.join();
  delete batch;
}
#endif

// ---------------------------------------------------------------------------------------------- for the
// tests

// GPU memory: an address that the CPU faults on, and where its bytes are.
DOUBLE_API uint64_t gds_double_allocate(size_t bytes) {
  void* at = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  auto* shadow = static_cast<char*>(std::aligned_alloc(kBlock, (bytes + kBlock - 1) / kBlock * kBlock));
  std::lock_guard lock(state().mutex);
  state().memory[reinterpret_cast<uint64_t>(at)] = {shadow, bytes};
  return reinterpret_cast<uint64_t>(at);
}
DOUBLE_API void* gds_double_bytes(uint64_t address) { return state().memory.at(address).shadow; }
DOUBLE_API void gds_double_fail_next(int code) { state().failing = code; }
DOUBLE_API void gds_double_move_at_most(size_t bytes) { state().most = bytes; }
DOUBLE_API void gds_double_disturb_batches(bool hanging, bool losing) {
  std::lock_guard lock(state().mutex);
  state().hanging = hanging;
  state().losing = losing;
  state().changed.notify_all();
}
// What the calling thread has as its own, as an application that uses CUDA.
DOUBLE_API void gds_double_enter(void* wanted) { contexts = {wanted}; }
DOUBLE_API bool gds_double_is_in(void* wanted) { return contexts == std::vector<void*>{wanted}; }
DOUBLE_API const char* gds_double_violations() { return state().violations.c_str(); }
// What is held: buffers, handles, contexts; and what was done: single operations, batched ones, cancelled
// batches.
DOUBLE_API uint64_t gds_double_count(int what) {
  std::lock_guard lock(state().mutex);
  const State& all = state();
  const uint64_t counts[] = {all.buffers.size(), all.handles.size(), static_cast<uint64_t>(all.retained),
                             all.singles,        all.batched,        all.cancels};
  return counts[what];
}
