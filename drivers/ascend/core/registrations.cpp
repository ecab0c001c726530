#include "registrations.hpp"

#include <iterator>

namespace mooncake::ascend {
namespace {

uint64_t page_of(uint64_t address) { return address / kDevicePage * kDevicePage; }
uint64_t end_of(uint64_t address, uint64_t length) { return page_of(address + length - 1) + kDevicePage; }

}  // namespace

std::map<uint64_t, Registrations::Known>::const_iterator Registrations::holding(uint64_t begin,
                                                                                uint64_t end) const {
  auto after = known_.upper_bound(begin);
  if (after == known_.begin()) return known_.end();
  auto found = std::prev(after);
  return end <= found->second.end ? found : known_.end();
}

bool Registrations::shared(uint64_t address, uint64_t length) const {
  auto found = holding(page_of(address), end_of(address, length));
  return found != known_.end() && found->second.users > 1;
}

Status Registrations::add(const Acl& acl, void* engine, uint64_t address, uint64_t length) {
  uint64_t begin = page_of(address), end = end_of(address, length);
  if (auto found = holding(begin, end); found != known_.end()) {
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
  return add_range(acl, engine, begin, end);
}

Status Registrations::add_range(const Acl& acl, void* engine, uint64_t begin, uint64_t end) {
  if (of_process_.fetch_add(1) >= kMostRegistrations) {
    --of_process_;
    return failed(MC_NO_MEMORY,
                  "HIXL registers at most 256 ranges of a process, over all of its engines, and this process "
                  "has as many; register fewer, larger ones, or close regions");
  }
  void* handle = nullptr;
  Status status =
      check_hixl(acl.shim->register_memory(engine, begin, end - begin, 1, &handle), "RegisterMem");
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

void Registrations::remove(const Acl& acl, void* engine, uint64_t address, uint64_t length) {
  auto found = holding(page_of(address), end_of(address, length));
  if (found == known_.end() || --known_[found->first].users > 0) return;
  (void)acl.shim->deregister_memory(engine, found->second.handle);
  known_.erase(found);
  --of_process_;
}

void Registrations::clear(const Acl& acl, void* engine) {
  for (auto& [begin, range] : known_) (void)acl.shim->deregister_memory(engine, range.handle);
  of_process_ -= known_.size();
  known_.clear();
}

}  // namespace mooncake::ascend
