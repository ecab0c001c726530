#include "pins.hpp"

#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>

#include "support/os.hpp"

namespace mooncake::nvlink {
namespace {

struct Range {
  uint64_t end;
  uint64_t users;
};

struct Registry {
  std::mutex mutex;
  std::map<uint64_t, Range> ranges;  // by start, disjoint
};

struct Registries {
  std::mutex mutex;
  std::map<const Cuda*, Registry> by_library;
};

// One for all endpoints of the process.
Registry& registry(const Cuda& cuda) {
  auto& [mutex, all] = driver::of_this_process<Registries>();
  std::lock_guard lock(mutex);
  return all[&cuda];
}

bool pinned_by_its_owner(const Cuda& cuda, uint64_t address) {
  unsigned kind = 0;
  return cuda.cuPointerGetAttribute(&kind, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address) == CUDA_SUCCESS &&
         kind == CU_MEMORYTYPE_HOST;
}

}  // namespace

Status Pin::open(Devices& devices, uint64_t address, uint64_t length, bool read_only,
                 std::shared_ptr<Pin>& pin) {
  const Cuda& cuda = devices.cuda();
  auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  uint64_t begin = address / page * page;
  uint64_t end = (address + length + page - 1) / page * page;
  std::shared_ptr<Pin> made(new Pin(cuda, devices.at(0).number()));
  Status status =
      cuda.check(cuda.cuDevicePrimaryCtxRetain(&made->context_, made->device_), "cuDevicePrimaryCtxRetain");
  if (!status.ok()) {
    made->context_ = nullptr;
    return status;
  }
  status =
      made->add(begin, end, CU_MEMHOSTREGISTER_PORTABLE | (read_only ? CU_MEMHOSTREGISTER_READ_ONLY : 0u));
  if (!status.ok())
    return failed(status.code, "cannot register " + std::to_string(length) + " bytes of main memory: " +
                                   status.reason + " (raise the limit of locked memory, ulimit -l)");
  pin = std::move(made);
  return {};
}

Status Pin::add(uint64_t begin, uint64_t end, unsigned flags) {
  Registry& known = registry(cuda_);
  std::lock_guard lock(known.mutex);
  Current current(cuda_, context_);
  auto after = known.ranges.upper_bound(begin);
  bool ours = after != known.ranges.begin() && std::prev(after)->second.end > begin;
  if (!ours && pinned_by_its_owner(cuda_, begin) && pinned_by_its_owner(cuda_, end - 1)) return {};
  for (uint64_t at = begin; at < end;) {
    auto next = known.ranges.upper_bound(at);
    if (next != known.ranges.begin() && std::prev(next)->second.end > at) {
      auto covering = std::prev(next);
      ++covering->second.users;
      starts_.push_back(covering->first);
      at = covering->second.end;
    } else {
      uint64_t until = next == known.ranges.end() ? end : std::min(end, next->first);
      Status status = cuda_.check(cuda_.cuMemHostRegister(reinterpret_cast<void*>(at), until - at, flags),
                                  "cuMemHostRegister");
      if (!status.ok()) return status;  // the destructor gives back what was taken
      known.ranges[at] = {until, 1};
      starts_.push_back(at);
      at = until;
    }
    if (starts_.size() > 1) boundaries_.push_back(starts_.back());
  }
  return {};
}

Pin::~Pin() {
  if (context_ == nullptr) return;
  if (!starts_.empty()) give_back();
  cuda_.cuDevicePrimaryCtxRelease(device_);
}

void Pin::give_back() {
  Registry& known = registry(cuda_);
  std::lock_guard lock(known.mutex);
  Current current(cuda_, context_);
  for (uint64_t start : starts_) {
    auto found = known.ranges.find(start);
    if (--found->second.users > 0) continue;
    cuda_.cuMemHostUnregister(reinterpret_cast<void*>(start));
    known.ranges.erase(found);
  }
}

uint64_t Pin::end_of_run(uint64_t address) const {
  auto next = std::upper_bound(boundaries_.begin(), boundaries_.end(), address);
  return next == boundaries_.end() ? ~0ull : *next;
}

}  // namespace mooncake::nvlink
