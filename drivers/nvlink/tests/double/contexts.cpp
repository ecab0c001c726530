// Devices, contexts, streams and events of the double.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <fstream>

#include "state.hpp"

namespace cuda_double {

State& state() {
  static auto* state = new State;  // threads of streams may outlive static objects
  return *state;
}

std::vector<Context*>& stack() {
  thread_local std::vector<Context*> contexts;
  return contexts;
}

bool due(const char* control) {
  int& left = state().controls[control];
  return left > 0 && --left == 0;
}

Context* current() { return stack().empty() ? nullptr : stack().back(); }

namespace {

// `settings` beside this library: a name and a number in each line.
int setting(const std::string& name, int otherwise) {
  Dl_info about{};
  if (dladdr(reinterpret_cast<void*>(&current), &about) == 0) return otherwise;
  std::string path(about.dli_fname);
  std::ifstream file(path.substr(0, path.rfind('/') + 1) + "settings");
  std::string known;
  int value = 0;
  while (file >> known >> value) {
    if (known == name) return value;
  }
  return otherwise;
}

Stream* stream_of(Context* context, CUstream handle) {
  auto* stream = reinterpret_cast<Stream*>(handle);
  return context->streams.contains(stream) ? stream : nullptr;
}

Event* event_of(CUevent handle) {
  auto* event = reinterpret_cast<Event*>(handle);
  for (auto& context : state().contexts) {
    if (context->events.contains(event)) return event;
  }
  return nullptr;
}

void work(Stream* stream) {
  State& all = state();
  std::unique_lock lock(all.mutex);
  for (;;) {
    all.changed.wait(lock,
                     [&] { return stream->ending || (!stream->tasks.empty() && all.controls["hold"] == 0); });
    if (stream->tasks.empty()) return;
    auto task = std::move(stream->tasks.front());
    stream->tasks.pop_front();
    stream->busy = true;
    lock.unlock();
    task();
    lock.lock();
    stream->busy = false;
    all.changed.notify_all();
  }
}

// With the mutex.
void put(Stream* stream, std::function<void()> task) {
  stream->tasks.push_back(std::move(task));
  if (!stream->thread.joinable()) stream->thread = std::thread(work, stream);
  state().changed.notify_all();
}

bool may_copy(Context* context, const Range& range, bool writing) {
  switch (range.kind) {
    case Kind::kHost:
      return !writing || !range.read_only;
    case Kind::kManaged:
      return true;
    case Kind::kMapped: {
      auto found = range.access.find(context->device);
      if (found == range.access.end()) return false;
      return (found->second & (writing ? 2 : 1)) != 0;
    }
    case Kind::kMalloc:
    case Kind::kIpc:
      return range.device == context->device || context->peers.contains(range.device);
  }
  return false;
}

CUresult enqueue_piece(Context* context, Stream* stream, CUdeviceptr to, CUdeviceptr from, size_t bytes,
                       bool through_host) {
  auto target = find(to, bytes), source = find(from, bytes);
  // Hardware takes memory that is not pinned too, and then waits; this driver promises never to give it any.
  if (!target || !source) return CUDA_ERROR_INVALID_VALUE;
  if (!through_host && (!may_copy(context, *target, true) || !may_copy(context, *source, false)))
    return CUDA_ERROR_INVALID_VALUE;
  put(stream, [=] {
    State& all = state();
    {
      std::lock_guard lock(all.mutex);
      bool gone = !target->alive || !source->alive;
      for (const auto& range : {target, source}) {
        if (range->kind == Kind::kIpc && range->physical->head->freed.load() != 0) gone = true;
      }
      if (gone) context->error = CUDA_ERROR_ILLEGAL_ADDRESS;
      if (context->error != CUDA_SUCCESS) return;
    }
    std::memmove(target->data + (to - target->base), source->data + (from - source->base), bytes);
  });
  return CUDA_SUCCESS;
}

// How far memory goes on from an address. Only mappings may follow one another within a copy.
size_t run_of(CUdeviceptr address, size_t bytes) {
  auto range = find(address, 1);
  if (!range) return 0;
  if (range->kind != Kind::kMapped) return bytes;
  return std::min<size_t>(bytes, range->base + range->bytes - address);
}

CUresult enqueue_copy(Context* context, Stream* stream, CUdeviceptr to, CUdeviceptr from, size_t bytes,
                      bool through_host) {
  if (bytes == 0) return CUDA_SUCCESS;
  if (due("fail copy")) return CUDA_ERROR_OUT_OF_MEMORY;
  ++state().copies;
  for (size_t done = 0; done < bytes;) {
    size_t piece = std::min(run_of(to + done, bytes - done), run_of(from + done, bytes - done));
    if (piece == 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = enqueue_piece(context, stream, to + done, from + done, piece, through_host);
    if (result != CUDA_SUCCESS) return result;
    done += piece;
  }
  return CUDA_SUCCESS;
}

CUresult enqueue(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream handle, bool through_host) {
  DOUBLE_ENTER_CONTEXT();
  Stream* stream = stream_of(context, handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return enqueue_copy(context, stream, to, from, bytes, through_host);
}

}  // namespace

CUresult enqueue_batch(CUdeviceptr* to, CUdeviceptr* from, size_t* sizes, size_t count,
                       CUmemcpyAttributes* attributes, size_t* firsts, size_t kinds, size_t* bad,
                       CUstream handle) {
  DOUBLE_ENTER_CONTEXT();
  Stream* stream = stream_of(context, handle);  // no default stream, by the rules
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  bool good = count > 0 && kinds == 1 && firsts != nullptr && firsts[0] == 0 && attributes != nullptr &&
              attributes->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
  if (!good) return CUDA_ERROR_INVALID_VALUE;
  for (size_t i = 0; i < count; ++i) {
    if (sizes[i] == 0) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = enqueue_copy(context, stream, to[i], from[i], sizes[i], false);
    if (result == CUDA_SUCCESS) continue;
    if (bad != nullptr) *bad = i;
    return result;
  }
  ++state().batches;
  return CUDA_SUCCESS;
}

}  // namespace cuda_double

using namespace cuda_double;

DOUBLE_API cuInit(unsigned flags) {
  State& all = state();
  std::lock_guard lock(all.mutex);
  if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (all.initialised) return CUDA_SUCCESS;
  all.devices = setting("DEVICES", 2);
  all.version = setting("VERSION", 13000);
  all.peers = setting("PEERS", 1) != 0;
  all.fabric = setting("FABRIC", 0) != 0;
  all.ipc = setting("IPC", 1) != 0;
  if (int error = setting("INIT_ERROR", 0); error != 0) return error;
  if (all.devices == 0) return CUDA_ERROR_NO_DEVICE;
  for (int i = 0; i < all.devices; ++i) {
    all.contexts.push_back(std::make_unique<Context>());
    all.contexts.back()->device = i;
  }
  all.initialised = true;
  return CUDA_SUCCESS;
}

DOUBLE_API cuDriverGetVersion(int* version) {
  DOUBLE_ENTER();
  *version = state().version;
  return CUDA_SUCCESS;
}

DOUBLE_API cuGetErrorName(CUresult error, const char** name) {
  static const std::map<CUresult, const char*> names = {
      {CUDA_SUCCESS, "CUDA_SUCCESS"},
      {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
      {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"},
      {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED"},
      {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"},
      {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"},
      {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
      {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
      {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
      {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED"},
      {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
      {CUDA_ERROR_SYSTEM_NOT_READY, "CUDA_ERROR_SYSTEM_NOT_READY"},
  };
  auto found = names.find(error);
  *name = found == names.end() ? nullptr : found->second;
  return found == names.end() ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
}

DOUBLE_API cuGetErrorString(CUresult, const char** words) {
  *words = "says the test double";
  return CUDA_SUCCESS;
}

DOUBLE_API cuDeviceGetCount(int* count) {
  DOUBLE_ENTER();
  *count = state().devices;
  return CUDA_SUCCESS;
}

DOUBLE_API cuDeviceGet(CUdevice* device, int ordinal) {
  DOUBLE_ENTER();
  if (ordinal < 0 || ordinal >= state().devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}

DOUBLE_API cuDeviceGetName(char* name, int capacity, CUdevice device) {
  DOUBLE_ENTER();
  std::strncpy(name, ("double " + std::to_string(device)).c_str(), static_cast<size_t>(capacity));
  return CUDA_SUCCESS;
}

DOUBLE_API cuDeviceGetUuid(CUuuid* uuid, CUdevice device) {
  DOUBLE_ENTER();
  std::memset(uuid, 0, sizeof *uuid);
  // CUDA_VISIBLE_DEVICES gives processes different views of the same GPUs.
  uuid->bytes[0] = static_cast<char>(1 + device + setting("FIRST", 0));
  return CUDA_SUCCESS;
}

DOUBLE_API cuDeviceGetAttribute(int* value, int attribute, CUdevice) {
  DOUBLE_ENTER();
  *value = attribute == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED ? state().fabric : 1;
  return CUDA_SUCCESS;
}

DOUBLE_API cuDeviceCanAccessPeer(int* can, CUdevice from, CUdevice to) {
  DOUBLE_ENTER();
  *can = from != to && state().peers;
  return CUDA_SUCCESS;
}

DOUBLE_API cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  DOUBLE_ENTER();
  if (device < 0 || device >= state().devices) return CUDA_ERROR_INVALID_DEVICE;
  Context* found = state().contexts[static_cast<size_t>(device)].get();
  ++found->retained;
  *context = reinterpret_cast<CUcontext>(found);
  return CUDA_SUCCESS;
}

DOUBLE_API cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  DOUBLE_ENTER();
  Context* found = state().contexts[static_cast<size_t>(device)].get();
  if (found->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  if (--found->retained > 0) return CUDA_SUCCESS;
  if (!found->streams.empty()) state().violations.push_back("a context ended with streams in it");
  if (!found->events.empty()) state().violations.push_back("a context ended with events in it");
  found->peers.clear();
  found->error = CUDA_SUCCESS;
  return CUDA_SUCCESS;
}

DOUBLE_API cuCtxPushCurrent_v2(CUcontext handle) {
  DOUBLE_ENTER();
  auto* context = reinterpret_cast<Context*>(handle);
  if (context == nullptr || context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
  stack().push_back(context);
  return CUDA_SUCCESS;
}

DOUBLE_API cuCtxPopCurrent_v2(CUcontext* handle) {
  DOUBLE_ENTER();
  if (stack().empty()) return CUDA_ERROR_INVALID_CONTEXT;
  if (handle != nullptr) *handle = reinterpret_cast<CUcontext>(stack().back());
  stack().pop_back();
  return CUDA_SUCCESS;
}

DOUBLE_API cuCtxEnablePeerAccess(CUcontext peer, unsigned flags) {
  DOUBLE_ENTER_CONTEXT();
  auto* other = reinterpret_cast<Context*>(peer);
  if (flags != 0 || other == context) return CUDA_ERROR_INVALID_VALUE;
  if (!state().peers) return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
  bool added = context->peers.insert(other->device).second;
  return added ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
}

DOUBLE_API cuCtxSynchronize() {
  DOUBLE_ENTER_CONTEXT();
  state().changed.wait(lock, [&] {
    return std::all_of(context->streams.begin(), context->streams.end(),
                       [](const Stream* stream) { return stream->tasks.empty() && !stream->busy; });
  });
  return context->error;
}

DOUBLE_API cuStreamCreate(CUstream* handle, unsigned flags) {
  DOUBLE_ENTER_CONTEXT();
  if (flags > CU_STREAM_NON_BLOCKING) return CUDA_ERROR_INVALID_VALUE;
  auto* stream = new Stream;
  stream->context = context;
  context->streams.insert(stream);
  *handle = reinterpret_cast<CUstream>(stream);
  return CUDA_SUCCESS;
}

DOUBLE_API cuStreamDestroy_v2(CUstream handle) {
  std::thread thread;
  Stream* stream = nullptr;
  {
    DOUBLE_ENTER_CONTEXT();
    stream = stream_of(context, handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    context->streams.erase(stream);
    stream->ending = true;
    state().changed.notify_all();
    thread = std::move(stream->thread);
  }
  if (thread.joinable()) thread.join();
  delete stream;
  return CUDA_SUCCESS;
}

DOUBLE_API cuStreamGetCtx(CUstream handle, CUcontext* context) {
  DOUBLE_ENTER();
  auto* stream = reinterpret_cast<Stream*>(handle);
  for (auto& known : state().contexts) {
    if (!known->streams.contains(stream)) continue;
    *context = reinterpret_cast<CUcontext>(known.get());
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_HANDLE;
}

DOUBLE_API cuStreamWaitEvent(CUstream handle, CUevent event_handle, unsigned flags) {
  DOUBLE_ENTER();
  auto* stream = reinterpret_cast<Stream*>(handle);
  bool known = false;
  for (auto& context : state().contexts) known = known || context->streams.contains(stream);
  Event* event = event_of(event_handle);
  if (!known || event == nullptr || flags != 0) return CUDA_ERROR_INVALID_HANDLE;
  if (due("fail wait")) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t until = event->recorded;
  put(stream, [event, until] {
    State& all = state();
    std::unique_lock inside(all.mutex);
    all.changed.wait(inside, [&] { return event->reached >= until; });
  });
  return CUDA_SUCCESS;
}

DOUBLE_API cuStreamQuery(CUstream handle) {
  DOUBLE_ENTER_CONTEXT();
  Stream* stream = stream_of(context, handle);
  if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return stream->tasks.empty() && !stream->busy ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

DOUBLE_API cuStreamSynchronize(CUstream handle) {
  std::unique_lock lock(state().mutex);
  auto* stream = reinterpret_cast<Stream*>(handle);
  auto done = std::make_shared<bool>(false);
  put(stream, [done] {
    std::lock_guard inside(state().mutex);
    *done = true;
  });
  state().changed.wait(lock, [&] { return *done; });
  return stream->context->error;
}

DOUBLE_API cuLaunchHostFunc(CUstream handle, void (*function)(void*), void* argument) {
  DOUBLE_ENTER();
  put(reinterpret_cast<Stream*>(handle), [function, argument] { function(argument); });
  return CUDA_SUCCESS;
}

DOUBLE_API cuEventCreate(CUevent* handle, unsigned flags) {
  DOUBLE_ENTER_CONTEXT();
  if (flags != CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_VALUE;
  auto* event = new Event;
  event->context = context;
  context->events.insert(event);
  *handle = reinterpret_cast<CUevent>(event);
  return CUDA_SUCCESS;
}

DOUBLE_API cuEventDestroy_v2(CUevent handle) {
  DOUBLE_ENTER();
  Event* event = event_of(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  event->context->events.erase(event);
  state().dying_events.insert(event);  // tasks may name it yet: it stays until the process ends
  return CUDA_SUCCESS;
}

DOUBLE_API cuEventRecord(CUevent handle, CUstream stream_handle) {
  DOUBLE_ENTER_CONTEXT();
  Event* event = event_of(handle);
  Stream* stream = stream_of(context, stream_handle);
  // The event must be of the stream's context.
  if (event == nullptr || stream == nullptr || event->context != context) return CUDA_ERROR_INVALID_HANDLE;
  if (due("fail record")) return CUDA_ERROR_OUT_OF_MEMORY;
  uint64_t number = ++event->recorded;
  put(stream, [event, number] {
    std::lock_guard inside(state().mutex);
    event->reached = number;
  });
  return CUDA_SUCCESS;
}

DOUBLE_API cuEventQuery(CUevent handle) {
  DOUBLE_ENTER();
  Event* event = event_of(handle);
  if (event == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  if (event->context->error != CUDA_SUCCESS) return event->context->error;
  return event->reached >= event->recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

DOUBLE_API cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
  return enqueue(to, from, bytes, stream, false);
}

DOUBLE_API cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_context, CUdeviceptr from, CUcontext from_context,
                             size_t bytes, CUstream stream) {
  {
    DOUBLE_ENTER();
    auto target = find(to, bytes), source = find(from, bytes);
    bool good = target && source && reinterpret_cast<Context*>(to_context)->device == target->device &&
                reinterpret_cast<Context*>(from_context)->device == source->device;
    if (!good) return CUDA_ERROR_INVALID_VALUE;
  }
  return enqueue(to, from, bytes, stream, true);
}
