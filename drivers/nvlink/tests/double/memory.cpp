// Memory of the double: allocations, mappings, handles, registrations.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "state.hpp"

namespace cuda_double {
namespace {

constexpr uint64_t kMagic = 0x646f75626c650001;

// What an exported handle says: which descriptor of which process is the memory.
struct Name {
  uint64_t magic;
  int64_t pid;
  int64_t fd;
  uint64_t id;
};

std::shared_ptr<Physical> map_physical(int fd, uint64_t bytes) {
  void* head = mmap(nullptr, kHead, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, kHead);
  if (head == MAP_FAILED || data == MAP_FAILED) return nullptr;
  auto made = std::make_shared<Physical>();
  made->fd = fd;
  made->head = static_cast<Head*>(head);
  made->data = static_cast<char*>(data);
  made->bytes = bytes;
  return made;
}

std::shared_ptr<Physical> open_name(const Name& name) {
  if (name.magic != kMagic) return nullptr;
  std::string path = "/proc/" + std::to_string(name.pid) + "/fd/" + std::to_string(name.fd);
  return open_physical(open(path.c_str(), O_RDWR | O_CLOEXEC));
}

// Addresses of the GPU: the CPU must not touch them.
uint64_t take_addresses(uint64_t bytes, uint64_t alignment) {
  void* base =
      mmap(nullptr, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return 0;
  auto address = reinterpret_cast<uint64_t>(base);
  uint64_t aligned = (address + alignment - 1) / alignment * alignment;
  if (aligned > address) munmap(base, aligned - address);
  if (aligned + bytes < address + bytes + alignment)
    munmap(reinterpret_cast<void*>(aligned + bytes), address + alignment - aligned);
  return aligned;
}

// With the mutex.
uint64_t add_range(Kind kind, int device, std::shared_ptr<Physical> physical, uint64_t base) {
  auto range = std::make_shared<Range>();
  range->kind = kind;
  range->base = base;
  range->bytes = physical->bytes;
  range->device = device;
  range->id = state().next_id++;
  range->data = physical->data;
  range->physical = std::move(physical);
  state().ranges[base] = range;
  return base;
}

// With the mutex. Waits for what runs, as cuMemFree does.
void settle(std::unique_lock<std::mutex>& lock) {
  for (auto& context : state().contexts) {
    for (Stream* stream : context->streams) {
      if (stream->tasks.empty()) continue;
      state().changed.wait(lock, [&] { return !context->streams.contains(stream) || stream->tasks.empty(); });
    }
  }
}

std::shared_ptr<Range> at(uint64_t base, Kind kind) {
  auto found = state().ranges.find(base);
  return found == state().ranges.end() || found->second->kind != kind ? nullptr : found->second;
}

CUresult remove(const std::shared_ptr<Range>& range) {
  range->alive = false;
  state().ranges.erase(range->base);
  return CUDA_SUCCESS;
}

}  // namespace

Physical::~Physical() {
  munmap(head, kHead);
  munmap(data, bytes);
  close(fd);
}

std::shared_ptr<Physical> make_physical(uint64_t bytes, int device, uint32_t handle_types) {
  int fd = memfd_create("cuda-double", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, static_cast<off_t>(kHead + bytes)) != 0) return nullptr;
  auto made = map_physical(fd, bytes);
  if (!made) return nullptr;
  made->head->magic = kMagic;
  made->head->bytes = bytes;
  made->head->device = device;
  made->head->handle_types = handle_types;
  return made;
}

std::shared_ptr<Physical> open_physical(int fd) {
  Head head{};
  struct stat file{};
  if (fd < 0 || fstat(fd, &file) != 0 || pread(fd, &head, offsetof(Head, freed), 0) <= 0 ||
      head.magic != kMagic) {
    if (fd >= 0) close(fd);
    return nullptr;
  }
  auto made = map_physical(fd, head.bytes);
  if (made) made->imported = true;
  return made;
}

std::shared_ptr<Range> find(uint64_t address, uint64_t bytes) {
  auto after = state().ranges.upper_bound(address);
  if (after == state().ranges.begin()) return nullptr;
  auto range = std::prev(after)->second;
  bool inside = address - range->base < range->bytes && bytes <= range->bytes - (address - range->base);
  return inside ? range : nullptr;
}

}  // namespace cuda_double

using namespace cuda_double;

// ------------------------------------------------------------------------------------- allocations by
// address

DOUBLE_API cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  DOUBLE_ENTER_CONTEXT();
  if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  auto physical = make_physical((bytes + 4095) / 4096 * 4096, context->device, 0);
  uint64_t base = physical ? take_addresses(physical->bytes, 4096) : 0;
  if (base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = add_range(Kind::kMalloc, context->device, std::move(physical), base);
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemAllocManaged(CUdeviceptr* address, size_t bytes, unsigned) {
  DOUBLE_ENTER_CONTEXT();
  auto physical = make_physical((bytes + 4095) / 4096 * 4096, context->device, 0);
  if (!physical) return CUDA_ERROR_OUT_OF_MEMORY;
  auto base = reinterpret_cast<uint64_t>(physical->data);
  *address = add_range(Kind::kManaged, context->device, std::move(physical), base);
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemFree_v2(CUdeviceptr address) {
  DOUBLE_ENTER_CONTEXT();
  settle(lock);
  auto range = at(address, Kind::kMalloc);
  if (!range) range = at(address, Kind::kManaged);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  range->physical->head->freed.store(1);
  if (range->physical->head->importers.load() > 0)
    state().violations.push_back("memory was freed while another process had its IPC handle open");
  if (range->kind == Kind::kMalloc) munmap(reinterpret_cast<void*>(range->base), range->bytes);
  return remove(range);
}

DOUBLE_API cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes, CUdeviceptr address) {
  DOUBLE_ENTER_CONTEXT();
  auto range = find(address, 1);
  if (!range || range->kind == Kind::kHost) return CUDA_ERROR_NOT_FOUND;
  if (base != nullptr) *base = range->base;
  if (bytes != nullptr) *bytes = range->bytes;
  return CUDA_SUCCESS;
}

DOUBLE_API cuPointerGetAttribute(void* value, int attribute, CUdeviceptr address) {
  DOUBLE_ENTER();
  auto range = find(address, 1);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  bool mapped = range->kind == Kind::kMapped;
  switch (attribute) {
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
      *static_cast<unsigned*>(value) = range->kind == Kind::kHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
      *static_cast<unsigned long long*>(value) = range->id;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
      *static_cast<int*>(value) = range->device;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
      *static_cast<bool*>(value) = range->kind == Kind::kMalloc && state().ipc;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
      *static_cast<unsigned*>(value) = mapped ? range->physical->head->handle_types : 0;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
      if (!mapped) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<CUdeviceptr*>(value) = range->base;
      return CUDA_SUCCESS;
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
      if (!mapped) return CUDA_ERROR_INVALID_VALUE;
      *static_cast<size_t*>(value) = range->bytes;
      return CUDA_SUCCESS;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
}

// -------------------------------------------------------------------------------------------------- main
// memory

DOUBLE_API cuMemHostRegister_v2(void* memory, size_t bytes, unsigned flags) {
  DOUBLE_ENTER_CONTEXT();
  auto base = reinterpret_cast<uint64_t>(memory);
  if (bytes == 0 || base % 4096 != 0 || bytes % 4096 != 0) return CUDA_ERROR_INVALID_VALUE;
  auto next = state().ranges.lower_bound(base);
  bool overlaps = next != state().ranges.end() && next->first < base + bytes;
  if (next != state().ranges.begin()) {
    auto before = std::prev(next)->second;
    overlaps = overlaps || before->base + before->bytes > base;
  }
  if (overlaps) return CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
  // Every page must be there.
  std::vector<unsigned char> pages(bytes / 4096);
  if (mincore(memory, bytes, pages.data()) != 0) return CUDA_ERROR_INVALID_VALUE;
  auto range = std::make_shared<Range>();
  range->kind = Kind::kHost;
  range->base = base;
  range->bytes = bytes;
  range->device = -1;
  range->read_only = (flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
  range->id = state().next_id++;
  range->data = static_cast<char*>(memory);
  state().ranges[base] = range;
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemHostUnregister(void* memory) {
  DOUBLE_ENTER_CONTEXT();
  auto range = at(reinterpret_cast<uint64_t>(memory), Kind::kHost);
  return range ? remove(range) : CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
}

// ------------------------------------------------------------------------------------------------------
// legacy IPC

DOUBLE_API cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr address) {
  DOUBLE_ENTER_CONTEXT();
  auto range = at(address, Kind::kMalloc);  // the beginning of an allocation
  if (!range || !state().ipc) return CUDA_ERROR_INVALID_VALUE;
  Name name{kMagic, getpid(), range->physical->fd, range->id};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &name, sizeof name);
  return CUDA_SUCCESS;
}

DOUBLE_API cuIpcOpenMemHandle_v2(CUdeviceptr* address, CUipcMemHandle handle, unsigned flags) {
  DOUBLE_ENTER_CONTEXT();
  Name name;
  std::memcpy(&name, &handle, sizeof name);
  if (flags != CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) return CUDA_ERROR_INVALID_VALUE;
  if (name.pid == getpid()) return CUDA_ERROR_INVALID_CONTEXT;  // not in the process that made it
  std::string once(reinterpret_cast<char*>(&handle), sizeof handle);
  if (state().opened_ipc.contains(once)) return CUDA_ERROR_INVALID_VALUE;
  auto physical = open_name(name);
  if (!physical || physical->head->freed.load() != 0) return CUDA_ERROR_INVALID_VALUE;
  physical->head->importers.fetch_add(1);
  uint64_t base = take_addresses(physical->bytes, 4096);
  if (base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  *address = add_range(Kind::kIpc, context->device, std::move(physical), base);
  state().opened_ipc[once] = base;
  return CUDA_SUCCESS;
}

DOUBLE_API cuIpcCloseMemHandle(CUdeviceptr address) {
  DOUBLE_ENTER_CONTEXT();
  settle(lock);
  auto range = at(address, Kind::kIpc);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  ++state().closing;
  state().changed.wait(lock, [] { return state().controls["hold closing"] == 0; });
  --state().closing;
  range->physical->head->importers.fetch_sub(1);
  munmap(reinterpret_cast<void*>(range->base), range->bytes);
  std::erase_if(state().opened_ipc, [&](const auto& item) { return item.second == address; });
  return remove(range);
}

// ---------------------------------------------------------------------------------------- virtual memory
// management

DOUBLE_API cuMemGetAllocationGranularity(size_t* granularity, const CUmemAllocationProp* about, int) {
  DOUBLE_ENTER();
  if (about->type != CU_MEM_ALLOCATION_TYPE_PINNED) return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes, const CUmemAllocationProp* about,
                       unsigned long long flags) {
  DOUBLE_ENTER();
  if (bytes == 0 || bytes % kGranularity != 0 || flags != 0 ||
      about->location.type != CU_MEM_LOCATION_TYPE_DEVICE || about->location.id >= state().devices)
    return CUDA_ERROR_INVALID_VALUE;
  bool fabric = (about->requestedHandleTypes & CU_MEM_HANDLE_TYPE_FABRIC) != 0;
  if (fabric && !state().fabric) return CUDA_ERROR_NOT_PERMITTED;
  auto physical =
      make_physical(bytes, about->location.id, static_cast<uint32_t>(about->requestedHandleTypes));
  if (!physical) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = state().next_id++;
  state().handles[*handle] = {std::move(physical), 1};
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemRelease(CUmemGenericAllocationHandle handle) {
  DOUBLE_ENTER();
  auto found = state().handles.find(handle);
  if (found == state().handles.end()) return CUDA_ERROR_INVALID_VALUE;
  if (--found->second.second == 0) state().handles.erase(found);
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemAddressReserve(CUdeviceptr* address, size_t bytes, size_t alignment, CUdeviceptr,
                               unsigned long long flags) {
  DOUBLE_ENTER();
  if (bytes == 0 || bytes % kGranularity != 0 || alignment > kGranularity || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  uint64_t base = take_addresses(bytes, kGranularity);
  if (base == 0) return CUDA_ERROR_OUT_OF_MEMORY;
  state().reserved[base] = bytes;
  *address = base;
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemAddressFree(CUdeviceptr address, size_t bytes) {
  DOUBLE_ENTER();
  auto found = state().reserved.find(address);
  if (found == state().reserved.end() || found->second != bytes) return CUDA_ERROR_INVALID_VALUE;
  auto mapped = state().ranges.lower_bound(address);
  if (mapped != state().ranges.end() && mapped->first < address + bytes) return CUDA_ERROR_INVALID_VALUE;
  munmap(reinterpret_cast<void*>(address), bytes);
  state().reserved.erase(found);
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
  DOUBLE_ENTER();
  auto found = state().handles.find(handle);
  auto area = state().reserved.upper_bound(address);
  if (found == state().handles.end() || area == state().reserved.begin()) return CUDA_ERROR_INVALID_VALUE;
  --area;
  bool inside = address + bytes <= area->first + area->second;
  bool whole = bytes == found->second.first->bytes && offset == 0 && flags == 0;
  if (!inside || !whole || find(address, 1) || address % kGranularity != 0) return CUDA_ERROR_INVALID_VALUE;
  auto physical = found->second.first;
  int device = physical->head->device;
  add_range(Kind::kMapped, device, std::move(physical), address);
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemUnmap(CUdeviceptr address, size_t bytes) {
  DOUBLE_ENTER();
  settle(lock);
  std::vector<std::shared_ptr<Range>> whole;
  for (uint64_t next = address; next < address + bytes;) {
    auto range = at(next, Kind::kMapped);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    whole.push_back(range);
    next += range->bytes;
  }
  for (const auto& range : whole) remove(range);
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemSetAccess(CUdeviceptr address, size_t bytes, const CUmemAccessDesc* who, size_t count) {
  DOUBLE_ENTER();
  for (uint64_t next = address; next < address + bytes;) {
    auto range = at(next, Kind::kMapped);
    if (!range) return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; ++i) {
      int device = who[i].location.id;
      if (device != range->device && !state().peers) return CUDA_ERROR_INVALID_DEVICE;
      range->access[device] = who[i].flags;
    }
    next += range->bytes;
  }
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle, void* address) {
  DOUBLE_ENTER();
  auto range = at(reinterpret_cast<uint64_t>(address), Kind::kMapped);
  if (!range) return CUDA_ERROR_INVALID_VALUE;
  for (auto& [number, known] : state().handles) {
    if (known.first != range->physical) continue;
    ++known.second;
    *handle = number;
    return CUDA_SUCCESS;
  }
  *handle = state().next_id++;
  state().handles[*handle] = {range->physical, 1};
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemExportToShareableHandle(void* out, CUmemGenericAllocationHandle handle, int type,
                                        unsigned long long flags) {
  DOUBLE_ENTER();
  auto found = state().handles.find(handle);
  if (found == state().handles.end() || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  const Physical& physical = *found->second.first;
  if ((physical.head->handle_types & static_cast<unsigned>(type)) == 0) return CUDA_ERROR_NOT_SUPPORTED;
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    int fd = fcntl(physical.fd, F_DUPFD_CLOEXEC, 0);
    *static_cast<int*>(out) = fd;
    return fd < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
  }
  Name name{kMagic, getpid(), physical.fd, 0};
  std::memset(out, 0, sizeof(CUmemFabricHandle));
  std::memcpy(out, &name, sizeof name);
  return CUDA_SUCCESS;
}

DOUBLE_API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* in, int type) {
  DOUBLE_ENTER();
  std::shared_ptr<Physical> physical;
  if (type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    physical = open_physical(fcntl(static_cast<int>(reinterpret_cast<intptr_t>(in)), F_DUPFD_CLOEXEC, 0));
  } else if (type == CU_MEM_HANDLE_TYPE_FABRIC && state().fabric) {
    Name name;
    std::memcpy(&name, in, sizeof name);
    physical = open_name(name);
  } else {
    return CUDA_ERROR_NOT_PERMITTED;
  }
  if (!physical) return CUDA_ERROR_INVALID_VALUE;
  *handle = state().next_id++;
  state().handles[*handle] = {std::move(physical), 1};
  return CUDA_SUCCESS;
}
