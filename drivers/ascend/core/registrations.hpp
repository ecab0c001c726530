// Memory that HIXL was told of. HCCS maps device memory by pages of 2 MiB, so whole pages of it are
// registered; regions that lie in one registration share it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>

#include "acl.hpp"

namespace mooncake::ascend {

constexpr uint64_t kDevicePage = 2 << 20;
constexpr size_t kMostRegistrations = 256;  // of a process, by HIXL's rules

struct Memory {
  uint64_t address = 0;
  uint64_t length = 0;
  bool on_device = false;
  bool pinned = false;      // main memory of aclrtMallocHost
  bool registered = false;  // with HIXL
};

// Belongs to the worker thread.
class Registrations {
 public:
  // The generation grows with each registration: a peer that connected before does not know it.
  Status add(const Acl& acl, void* engine, const Memory& memory);
  // When it fails, the memory is still registered.
  Status remove(const Acl& acl, void* engine, const Memory& memory);
  void clear(const Acl& acl, void* engine);
  // HIXL has ended, and everything with it.
  void forget();
  uint64_t generation() const { return generation_; }
  // Whether somebody else uses the registration of this memory.
  bool shared(const Memory& memory) const;

 private:
  struct Known {
    uint64_t end;
    uint64_t users;
    void* handle;
  };
  std::map<uint64_t, Known>::const_iterator holding(const Memory& memory) const;
  Status add_range(const Acl& acl, void* engine, uint64_t begin, uint64_t end, bool on_device);

  inline static std::atomic<size_t> of_process_{0};  // over all endpoints
  std::map<uint64_t, Known> known_;
  uint64_t generation_ = 0;
};

}  // namespace mooncake::ascend
