// The initiator's half of memory.hpp.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "memory.hpp"
#include "support/os.hpp"

namespace mooncake::nvlink {
namespace {

// How long CUDA may take to close what another thread has let go of.
constexpr double kClosingS = 5.0;

// Something of a peer's in our address space, until the last user has let go.
class Mapping {
 public:
  uint64_t address = 0;
  int device = kHost;
  std::set<int> reachable;
  std::shared_ptr<const Pin> pin;
  std::function<void()> undo;
  std::string name;  // in the cache; empty: it is not there

  ~Mapping();
};
using MappingPointer = std::shared_ptr<Mapping>;

// CUDA opens an IPC handle only once in a process; a fabric handle need not be mapped twice. An entry whose
// pointer has expired is being closed.
struct Cache {
  std::mutex mutex;
  std::condition_variable closed;
  std::map<std::string, std::weak_ptr<Mapping>> mappings;
};
Cache& cache() { return driver::of_this_process<Cache>(); }

Mapping::~Mapping() {
  pin.reset();
  if (undo) undo();
  if (name.empty()) return;
  Cache& known = cache();
  {
    std::lock_guard lock(known.mutex);
    known.mappings.erase(name);
  }
  known.closed.notify_all();
}

template <class Make>
Status open_once(const std::string& name, MappingPointer& mapping, Make make) {
  Cache& known = cache();
  std::unique_lock lock(known.mutex);
  auto until = driver::time_point(driver::deadline_after(kClosingS));
  for (;;) {
    auto found = known.mappings.find(name);
    if (found == known.mappings.end()) break;
    mapping = found->second.lock();
    if (mapping) return {};
    if (known.closed.wait_until(lock, until) == std::cv_status::timeout && known.mappings.contains(name))
      return failed(MC_TIMEOUT, "CUDA does not end closing the peer's memory, which was in use before");
  }
  if (Status status = make(mapping); !status.ok()) return status;
  known.mappings[name] = mapping;
  mapping->name = name;
  return {};
}

// Which GPU's context opens a peer's memory: the GPU that holds it, where this process sees that.
int home_of(const Devices& devices, const GrantBody& body) {
  CUuuid uuid;
  std::memcpy(&uuid, body.uuid, sizeof uuid);
  return devices.find(uuid);
}

Status open_ipc(Devices& devices, const GrantBody& body, MappingPointer& mapping) {
  const Cuda& cuda = devices.cuda();
  int home = home_of(devices, body);
  int opener = home == kUnknown ? 0 : home;
  CUcontext context = nullptr;
  if (Status status = devices.at(opener).context(context); !status.ok()) return status;
  std::string name = "ipc " + std::to_string(opener) + " " +
                     std::string(reinterpret_cast<const char*>(body.handle), sizeof body.handle);
  return open_once(name, mapping, [&](MappingPointer& made) {
    CUipcMemHandle handle;
    std::memcpy(&handle, body.handle, sizeof handle);
    CUdeviceptr address = 0;
    Current current(cuda, context);
    Status status = cuda.check(cuda.cuIpcOpenMemHandle(&address, handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
                               "cuIpcOpenMemHandle");
    if (!status.ok()) return status;
    made = std::make_shared<Mapping>();
    made->address = address;
    made->device = home;
    if (home == kUnknown) made->reachable = {opener};
    // The context lives as long as an endpoint does, or somebody else's use of the GPU: retained once more.
    CUcontext again = nullptr;
    CUdevice number = devices.at(opener).number();
    bool kept = cuda.cuDevicePrimaryCtxRetain(&again, number) == CUDA_SUCCESS;
    made->undo = [&cuda, address, context, number, kept] {
      {
        Current current(cuda, context);
        cuda.cuIpcCloseMemHandle(address);
      }
      if (kept) cuda.cuDevicePrimaryCtxRelease(number);
    };
    return Status{};
  });
}

// Maps the parts one after the other into one range of addresses.
Status map_parts(Devices& devices, const std::vector<driver::Offer::Part>& parts, uint64_t total,
                 uint32_t access, int home, MappingPointer& mapping) {
  const Cuda& cuda = devices.cuda();
  CUdeviceptr base = 0;
  Status status = cuda.check(cuda.cuMemAddressReserve(&base, total, 0, 0, 0), "cuMemAddressReserve");
  if (!status.ok()) return status;
  auto made = std::make_shared<Mapping>();
  made->address = base;
  made->device = home;
  auto mapped = std::make_shared<uint64_t>(0);
  made->undo = [&cuda, base, total, mapped] {
    if (*mapped > 0) cuda.cuMemUnmap(base, *mapped);
    cuda.cuMemAddressFree(base, total);
  };
  for (const auto& part : parts) {
    PartBody body;
    if (!get_body(part.message, body) || body.size > total - *mapped)
      return failed(MC_UNREACHABLE, "the peer's grant is garbled");
    bool by_fd = body.handle_type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    if (by_fd && !part.fd)
      return failed(MC_IO, "a descriptor did not arrive; is the limit of open files reached?");
    void* exported = by_fd ? reinterpret_cast<void*>(static_cast<intptr_t>(part.fd->get()))
                           : static_cast<void*>(body.handle);
    CUmemGenericAllocationHandle handle = 0;
    status = cuda.check(
        cuda.cuMemImportFromShareableHandle(&handle, exported, static_cast<int>(body.handle_type)),
        by_fd
            ? "cuMemImportFromShareableHandle"
            : "cuMemImportFromShareableHandle of a fabric handle (are nvidia-imex and its channel set up?)");
    if (!status.ok()) return status;
    status = cuda.check(cuda.cuMemMap(base + *mapped, body.size, 0, handle, 0), "cuMemMap");
    cuda.cuMemRelease(handle);  // the mapping keeps the memory
    if (!status.ok()) return status;
    *mapped += body.size;
  }
  if (*mapped != total) return failed(MC_UNREACHABLE, "the peer's grant is garbled");
  bool reads = access == MC_ACCESS_READ;
  int flags = reads ? CU_MEM_ACCESS_FLAGS_PROT_READ : CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  status = failed(MC_UNSUPPORTED, "no GPU of this process reaches it");
  for (int i = 0; i < devices.count(); ++i) {
    CUmemAccessDesc who{{CU_MEM_LOCATION_TYPE_DEVICE, i}, flags};
    Status set = cuda.check(cuda.cuMemSetAccess(base, total, &who, 1), "cuMemSetAccess");
    if (set.ok())
      made->reachable.insert(i);
    else
      status = set;
  }
  if (made->reachable.empty()) return status;
  mapping = std::move(made);
  return {};
}

Status open_mapped(Devices& devices, const GrantBody& body, const std::vector<driver::Offer::Part>& parts,
                   uint32_t access, MappingPointer& mapping) {
  std::string name = "fabric " + std::to_string(access);
  for (const auto& part : parts) {
    PartBody about;
    if (part.fd || !get_body(part.message, about)) {
      name.clear();
      break;
    }
    name.append(reinterpret_cast<const char*>(about.handle), sizeof about.handle);
  }
  auto make = [&](MappingPointer& made) {
    return map_parts(devices, parts, body.mapped_bytes, access, home_of(devices, body), made);
  };
  return name.empty() ? make(mapping) : open_once(name, mapping, make);
}

Status open_file(Devices& devices, const GrantBody& body, const std::vector<driver::Offer::Part>& parts,
                 uint64_t length, uint32_t access, MappingPointer& mapping) {
  if (parts.size() != 1 || !parts[0].fd)
    return failed(MC_IO, "a descriptor did not arrive; is the limit of open files reached?");
  int fd = parts[0].fd->get();
  struct stat file{};
  if (fstat(fd, &file) != 0 || !driver::sealed_against_shrinking(fd) ||
      body.skip > static_cast<uint64_t>(file.st_size) ||
      length > static_cast<uint64_t>(file.st_size) - body.skip)
    return failed(MC_UNSUPPORTED, "its file could be cut short");
  bool reads = access == MC_ACCESS_READ;
  void* base = mmap(nullptr, length, reads ? PROT_READ : PROT_READ | PROT_WRITE, MAP_SHARED, fd,
                    static_cast<off_t>(body.skip));
  if (base == MAP_FAILED) return driver::system_failure(MC_NO_MEMORY, "cannot map its file", errno);
  madvise(base, length, MADV_DONTFORK);
  mapping = std::make_shared<Mapping>();
  mapping->address = reinterpret_cast<uint64_t>(base);
  mapping->undo = [base, length] { munmap(base, length); };
  std::shared_ptr<Pin> pin;
  Status status = Pin::open(devices, mapping->address, length, reads, pin);
  mapping->pin = std::move(pin);
  return status;
}

}  // namespace

RemoteMemory::~RemoteMemory() { mapping.reset(); }

Status open_memory(Devices& devices, const std::shared_ptr<driver::Link>& link, const driver::Message& grant,
                   std::vector<driver::Offer::Part> parts, std::shared_ptr<RemoteMemory>& memory) {
  GrantBody body;
  if (!get_body(grant, body) || grant.length == 0 || body.parts != parts.size())
    return failed(MC_UNREACHABLE, "the peer's grant is garbled");
  auto made = std::make_shared<RemoteMemory>();
  made->way = body.way;
  MappingPointer mapping;
  Status status;
  uint64_t skip = body.skip;
  if (body.way == Way::kDirect && link->peer.same_process) {
    made->place = {body.address, body.device, nullptr};
    if (body.device == kHost) {  // its owner has pinned it: this counts once more, and knows where it is cut
      std::shared_ptr<Pin> pin;
      status = Pin::open(devices, body.address, grant.length, false, pin);
      made->place.pin = std::move(pin);
    }
  } else if (body.way == Way::kFile) {
    status = open_file(devices, body, parts, grant.length, grant.access, mapping);
    skip = 0;
  } else if (body.way == Way::kIpc || body.way == Way::kMapped) {
    if (skip > body.mapped_bytes || grant.length > body.mapped_bytes - skip)
      status = failed(MC_UNREACHABLE, "the peer's grant is garbled");
    else if (body.way == Way::kIpc)
      status = open_ipc(devices, body, mapping);
    else
      status = open_mapped(devices, body, parts, grant.access, mapping);
  } else if (body.way != Way::kStaged) {
    status = failed(MC_UNREACHABLE, "the peer's grant is garbled");
  }
  if (!status.ok() && !link->peer.same_host) return status;
  if (!status.ok()) made->way = Way::kStaged;
  if (mapping && made->way != Way::kStaged) {
    made->place = {mapping->address + skip, mapping->device, mapping->pin};
    made->reachable = mapping->reachable;
    made->mapping = std::move(mapping);
  }
  memory = std::move(made);
  return {};
}

}  // namespace mooncake::nvlink
