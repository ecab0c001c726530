// A test double of libcuda: what it keeps of contexts, memory, streams and events. GPU memory is a memfd that
// processes really share; its address cannot be touched by the CPU, as on hardware.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda.hpp"

namespace cuda_double {

using namespace mooncake::nvlink;

constexpr uint64_t kGranularity = 2 << 20;  // of VMM allocations, as on today's GPUs
constexpr uint64_t kHead = 4096;

// The first page of each memfd: shared by all processes that have the memory.
struct Head {
  uint64_t magic;
  uint64_t bytes;
  int32_t device;
  uint32_t handle_types;
  std::atomic<uint32_t> freed;      // by its owner
  std::atomic<uint32_t> importers;  // open IPC mappings
};

struct Physical {
  int fd = -1;
  Head* head = nullptr;
  char* data = nullptr;  // where this process's copies read and write
  uint64_t bytes = 0;
  bool imported = false;
  bool owner_may_free = false;  // a legacy allocation of another process
  ~Physical();
};

enum class Kind { kMalloc, kMapped, kIpc, kManaged, kHost };

struct Range {
  Kind kind = Kind::kMalloc;
  uint64_t base = 0;
  uint64_t bytes = 0;
  int device = 0;
  uint64_t id = 0;
  bool alive = true;
  bool read_only = false;  // kHost
  char* data = nullptr;
  std::shared_ptr<Physical> physical;
  std::map<int, int> access;  // kMapped: device to flags
};

struct Context;

struct Event {
  Context* context = nullptr;
  uint64_t recorded = 0;  // times
  uint64_t reached = 0;
};

struct Stream {
  Context* context = nullptr;
  std::deque<std::function<void()>> tasks;
  bool ending = false;
  bool busy = false;
  std::thread thread;
};

struct Context {
  int device = 0;
  int retained = 0;
  CUresult error = CUDA_SUCCESS;  // sticky: the context is lost
  std::set<int> peers;
  std::set<Stream*> streams;
  std::set<Event*> events;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  bool initialised = false;
  int devices = 2;
  int version = 13000;
  bool peers = true;  // GPUs reach each other
  bool fabric = false;
  bool ipc = true;
  std::vector<std::unique_ptr<Context>> contexts;  // the primary ones
  std::map<uint64_t, std::shared_ptr<Range>> ranges;
  std::map<uint64_t, uint64_t> reserved;                                  // address ranges of VMM
  std::map<uint64_t, std::pair<std::shared_ptr<Physical>, int>> handles;  // with their users
  std::map<std::string, uint64_t> opened_ipc;
  std::set<Event*> dying_events;
  uint64_t next_id = 1;
  std::vector<std::string> violations;  // of rules that CUDA does not check, but does not survive either
  uint64_t copies = 0;
  uint64_t batches = 0;
  uint64_t closing = 0;                 // calls of cuIpcCloseMemHandle now
  std::map<std::string, int> controls;  // see cuda_double_set
};

State& state();
Context* current();
std::vector<Context*>& stack();

std::shared_ptr<Physical> make_physical(uint64_t bytes, int device, uint32_t handle_types);
std::shared_ptr<Physical> open_physical(int fd);  // takes the descriptor
// The range that holds all of [address, address + bytes); null when there is none. With the mutex.
std::shared_ptr<Range> find(uint64_t address, uint64_t bytes);

// Whether the call that a test has named by this control is now: "1" is the next one. With the mutex.
bool due(const char* control);

// Both shapes of cuMemcpyBatchAsync.
CUresult enqueue_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                       CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, size_t* bad,
                       CUstream stream);

// The beginning of most functions: initialised, and a context that is not lost.
#define DOUBLE_ENTER()                  \
  std::unique_lock lock(state().mutex); \
  if (!state().initialised) return CUDA_ERROR_NOT_INITIALIZED
#define DOUBLE_ENTER_CONTEXT()                               \
  DOUBLE_ENTER();                                            \
  Context* context = current();                              \
  if (context == nullptr) return CUDA_ERROR_INVALID_CONTEXT; \
  if (context->error != CUDA_SUCCESS) return context->error

}  // namespace cuda_double

#define DOUBLE_API extern "C" __attribute__((visibility("default"))) CUresult
