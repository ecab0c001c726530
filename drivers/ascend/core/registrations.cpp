#include "registrations.hpp"

#include <iterator>

namespace mooncake::ascend {
namespace {

// What is registered for it.
uint64_t begin_of(const Memory& memory) {
  return memory.on_device ? memory.address / kDevicePage * kDevicePage : memory.address;
}
uint64_t end_of(const Memory& memory) {
  uint64_t end = memory.address + memory.length;
  return memory.on_device ? (end + kDevicePage - 1) / kDevicePage * kDevicePage : end;
}

}  // namespace

std::map<uint64_t, Registrations::Known>::const_iterator Registrations::holding(const Memory& memory) const {
  auto after = known_.upper_bound(begin_of(memory));
  if (after == known_.begin()) return known_.end();
  auto found = std::prev(after);
  return end_of(memory) <= found->second.end ? found : known_.end();
}

bool Registrations::shared(const Memory& memory) const {
  auto found = holding(memory);
  return found != known_.end() && found->second.users > 1;
}

Status Registrations::add(const Acl& acl, void* engine, const Memory& memory) {
  uint64_t begin = begin_of(memory), end = end_of(memory);
  if (auto found = holding(memory); found != known_.end()) {
    ++known_[found->first].users;
    return {};
  }
  auto next = known_.lower_bound(begin);
  bool overlaps = (next != known_.end() && next->first < end) ||
                  (next != known_.begin() && std::prev(next)->second.end > begin);
  if (overlaps)
    return failed(MC_UNSUPPORTED,
                  "part of the memory's 2 MiB pages is registered with HIXL already, and it takes no page "
                  "twice; register the larger range first, or one range for both");
  return add_range(acl, engine, begin, end, memory.on_device);
}

Status Registrations::add_range(const Acl& acl, void* engine, uint64_t begin, uint64_t end, bool on_device) {
  if (of_process_.fetch_add(1) >= kMostRegistrations) {
    --of_process_;
    return failed(MC_NO_MEMORY,
                  "HIXL registers at most 256 ranges of a process, over all of its engines, and this process "
                  "has as many; register fewer, larger ones, or close regions");
  }
  void* handle = nullptr;
  Status status =
      check_hixl(acl.shim->register_memory(engine, begin, end - begin, on_device, &handle), "RegisterMem");
  if (!status.ok()) {
    --of_process_;
    const char* remedy = status.code == MC_NO_MEMORY
                             ? "; HIXL registers at most 50 GB of device memory of a process, over all of "
                               "its engines: register less, or close regions"
                             : "; HCCS needs memory of aclrtMalloc with ACL_MEM_MALLOC_HUGE_ONLY";
    return failed(status.code, status.reason + remedy);
  }
  known_[begin] = {end, 1, handle};
  ++generation_;
  return {};
}

Status Registrations::remove(const Acl& acl, void* engine, const Memory& memory) {
  auto found = holding(memory);
  if (found == known_.end()) return {};
  Known& known = known_[found->first];
  if (known.users == 1) {
    Status status = check_hixl(acl.shim->deregister_memory(engine, known.handle), "DeregisterMem");
    if (!status.ok()) return status;
    known_.erase(found);
    --of_process_;
  } else {
    --known.users;
  }
  return {};
}

void Registrations::clear(const Acl& acl, void* engine) {
  for (auto& [begin, range] : known_) (void)acl.shim->deregister_memory(engine, range.handle);
  forget();
}

void Registrations::forget() {
  of_process_ -= known_.size();
  known_.clear();
}

}  // namespace mooncake::ascend
