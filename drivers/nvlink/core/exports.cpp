// The owner's half of memory.hpp.
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>

#include "memory.hpp"

namespace mooncake::nvlink {
namespace {

constexpr size_t kMostParts = 1024;
constexpr auto kPieceLook = std::chrono::milliseconds(1);

std::string hex(uint64_t address) {
  char text[32];
  snprintf(text, sizeof text, "0x%llx", static_cast<unsigned long long>(address));
  return text;
}

Status check_gpu_memory(Devices& devices, const mc_memory& memory) {
  if (!devices.known(memory.device))
    return failed(MC_INVALID, "there is no CUDA device " + std::to_string(memory.device) +
                                  " in this process; it has " + std::to_string(devices.count()));
  const Cuda& cuda = devices.cuda();
  for (uint64_t address : {memory.address, memory.address + memory.length - 1}) {
    unsigned kind = 0;
    int ordinal = kUnknown;
    bool known =
        cuda.cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS &&
        cuda.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, address) == CUDA_SUCCESS;
    if (!known || kind != CU_MEMORYTYPE_DEVICE)
      return failed(MC_INVALID, "CUDA knows no GPU memory at " + hex(address) +
                                    "; pass the range that was allocated, while it is");
    if (ordinal != memory.device)
      return failed(MC_INVALID, "the memory at " + hex(address) + " is on CUDA device " +
                                    std::to_string(ordinal) + ", not " + std::to_string(memory.device));
  }
  return {};
}

// Peers may map a file only when nobody can cut it short under them.
Status adopt_file(const mc_memory& memory, Region& region) {
  int seals = fcntl(memory.fd, F_GET_SEALS);
  struct stat file{};
  if (fstat(memory.fd, &file) != 0)
    return driver::system_failure(
        MC_INVALID, "the memory's descriptor " + std::to_string(memory.fd) + " cannot be used", errno);
  bool whole = memory.fd_offset <= static_cast<uint64_t>(file.st_size) &&
               memory.length <= static_cast<uint64_t>(file.st_size) - memory.fd_offset;
  auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || memory.fd_offset % page != 0) return {};
  if (!whole)
    return failed(MC_INVALID, "the memory's descriptor refers to a file that ends before the region does");
  UniqueFd copy(fcntl(memory.fd, F_DUPFD_CLOEXEC, 0));
  if (!copy.valid()) return driver::system_failure(MC_IO, "cannot duplicate the memory's descriptor", errno);
  std::string path = "/proc/self/fd/" + std::to_string(copy.get());
  UniqueFd reading(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  region.fd = std::make_shared<const UniqueFd>(std::move(copy));
  if (reading.valid()) region.read_only_fd = std::make_shared<const UniqueFd>(std::move(reading));
  region.fd_offset = memory.fd_offset;
  return {};
}

template <class Value>
bool ask(const Cuda& cuda, int attribute, uint64_t address, Value& value) {
  return cuda.cuPointerGetAttribute(&value, attribute, address) == CUDA_SUCCESS;
}

// One part for each VMM allocation that the region touches.
Status export_mappings(const Cuda& cuda, const Region& region, int handle_type, driver::Offer& offer,
                       GrantBody& body) {
  uint64_t end = region.place.address + region.length;
  for (uint64_t at = region.place.address; at < end;) {
    CUdeviceptr base = 0;
    size_t size = 0;
    if (!ask(cuda, CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR, at, base) ||
        !ask(cuda, CU_POINTER_ATTRIBUTE_MAPPING_SIZE, at, size) || size == 0)
      return failed(MC_IO, "CUDA does not tell the mapping at " + hex(at));
    if (offer.parts.size() >= kMostParts) return failed(MC_UNSUPPORTED, "it has too many allocations to map");
    if (at == region.place.address) body.skip = at - base;
    CUmemGenericAllocationHandle handle = 0;
    Status status = cuda.check(
        cuda.cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(static_cast<uintptr_t>(base))),
        "cuMemRetainAllocationHandle");
    if (!status.ok()) return status;
    driver::Offer::Part part{driver::make_message(driver::MessageKind::kPart), nullptr};
    PartBody about{size, static_cast<uint32_t>(handle_type), 0, {}};
    int fd = -1;
    void* exported = handle_type == CU_MEM_HANDLE_TYPE_FABRIC ? static_cast<void*>(about.handle) : &fd;
    status = cuda.check(cuda.cuMemExportToShareableHandle(exported, handle, handle_type, 0),
                        "cuMemExportToShareableHandle");
    cuda.cuMemRelease(handle);
    if (!status.ok()) return status;
    if (fd >= 0) part.fd = std::make_shared<const UniqueFd>(fd);
    put_body(part.message, about);
    offer.parts.push_back(std::move(part));
    body.mapped_bytes += size;
    at = base + size;
  }
  body.parts = static_cast<uint32_t>(offer.parts.size());
  body.way = Way::kMapped;
  return {};
}

Status export_ipc(const Cuda& cuda, const Region& region, GrantBody& body) {
  CUdeviceptr base = 0;
  size_t size = 0;
  Status status =
      cuda.check(cuda.cuMemGetAddressRange(&base, &size, region.place.address), "cuMemGetAddressRange");
  if (!status.ok()) return status;
  if (region.place.address + region.length > base + size)
    return failed(MC_UNSUPPORTED, "the region goes over several allocations");
  CUipcMemHandle handle;
  status = cuda.check(cuda.cuIpcGetMemHandle(&handle, base), "cuIpcGetMemHandle");
  if (!status.ok()) return status;
  std::memcpy(body.handle, &handle, sizeof handle);
  body.skip = region.place.address - base;
  body.mapped_bytes = size;
  body.way = Way::kIpc;
  return {};
}

Status describe_gpu(Devices& devices, const driver::PeerInfo& peer, const Region& region,
                    driver::Offer& offer, GrantBody& body) {
  const Cuda& cuda = devices.cuda();
  CUcontext context = nullptr;
  if (Status status = devices.at(region.place.device).context(context); !status.ok()) return status;
  Current current(cuda, context);
  CUuuid uuid{};
  if (Status status = devices.uuid(region.place.device, uuid); !status.ok()) return status;
  std::memcpy(body.uuid, &uuid, sizeof uuid);
  unsigned long long identity = 0;
  if (ask(cuda, CU_POINTER_ATTRIBUTE_BUFFER_ID, region.place.address, identity)) body.identity = identity;
  unsigned long long types = 0;  // the driver writes 4 or 8 bytes
  ask(cuda, CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES, region.place.address, types);
  unsigned ipc = 0;  // a bool, or 4 bytes
  ask(cuda, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, region.place.address, ipc);
  Status status = failed(MC_UNSUPPORTED, "it can neither be exported nor has a fabric handle");
  bool by_fd = peer.same_host && (types & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) != 0;
  if (by_fd)
    status = export_mappings(cuda, region, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, offer, body);
  else if ((types & CU_MEM_HANDLE_TYPE_FABRIC) != 0)
    status = export_mappings(cuda, region, CU_MEM_HANDLE_TYPE_FABRIC, offer, body);
  else if (peer.same_host && ipc != 0)
    status = export_ipc(cuda, region, body);
  if (status.ok()) return {};
  offer.parts.clear();
  if (!peer.same_host)
    return failed(MC_UNSUPPORTED,
                  "GPU memory goes to another host by NVLink only when it was allocated "
                  "with CU_MEM_HANDLE_TYPE_FABRIC, and " +
                      status.reason);
  body.way = Way::kStaged;
  body.parts = 0;
  return {};
}

}  // namespace

Status Region::let_go(uint64_t deadline_ns) {
  while (pieces.load(std::memory_order_acquire) > 0) {
    if (driver::now_ns() >= deadline_ns)
      return failed(MC_TIMEOUT, "the GPU has not ended a copy of the region for a peer; call again");
    std::this_thread::sleep_for(kPieceLook);
  }
  place.pin.reset();
  return {};
}

Status make_region(Devices& devices, const mc_memory& memory, std::shared_ptr<Region>& region) {
  auto made = std::make_shared<Region>(memory.region_id, memory.length, memory.key);
  made->place.address = memory.address;
  if (memory.kind == MC_CUDA) {
    if (Status status = check_gpu_memory(devices, memory); !status.ok()) return status;
    made->place.device = memory.device;
  } else {
    std::shared_ptr<Pin> pin;
    Status status = Pin::open(devices, memory.address, memory.length, false, pin);
    if (!status.ok()) return status;
    made->place.pin = std::move(pin);
    if (memory.fd >= 0) {
      if (status = adopt_file(memory, *made); !status.ok()) return status;
    }
  }
  region = std::move(made);
  return {};
}

Status describe(Devices& devices, const driver::Session& peer, const Region& region, uint32_t access,
                driver::Offer& offer) {
  GrantBody body{};
  body.device = region.place.device;
  Status status;
  if (peer.peer.same_process) {
    body.way = Way::kDirect;
    body.address = region.place.address;
  } else if (region.place.device != kHost) {
    status = describe_gpu(devices, peer.peer, region, offer, body);
  } else if (!peer.peer.same_host) {
    status = failed(MC_UNSUPPORTED, "main memory does not go to another host by NVLink");
  } else {
    bool reads = access == MC_ACCESS_READ;
    std::shared_ptr<const UniqueFd> file = reads ? region.read_only_fd : region.fd;
    body.way = file ? Way::kFile : Way::kStaged;
    body.skip = region.fd_offset;
    if (file) {
      offer.parts.push_back({driver::make_message(driver::MessageKind::kPart), std::move(file)});
      body.parts = 1;
    }
  }
  put_body(offer.grant, body);
  return status;
}

}  // namespace mooncake::nvlink
