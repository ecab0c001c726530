// Memory that HIXL was told of. HCCS maps device memory by pages of 2 MiB, so whole pages are registered, and
// regions that lie in one registration share it.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>

#include "acl.hpp"

namespace mooncake::ascend {

constexpr uint64_t kDevicePage = 2 << 20;
constexpr size_t kMostRegistrations = 256;  // of a process, by HIXL's rules

// Belongs to the worker thread.
class Registrations {
 public:
  // `*generation` grows with each registration: a peer that connected before does not know it.
  Status add(const Acl& acl, void* engine, uint64_t address, uint64_t length);
  void remove(const Acl& acl, void* engine, uint64_t address, uint64_t length);
  void clear(const Acl& acl, void* engine);
  uint64_t generation() const { return generation_; }
  // Whether somebody else uses the registration of this memory.
  bool shared(uint64_t address, uint64_t length) const;

 private:
  struct Known {
    uint64_t end;
    uint64_t users;
    void* handle;
  };
  std::map<uint64_t, Known>::const_iterator holding(uint64_t begin, uint64_t end) const;
  Status add_range(const Acl& acl, void* engine, uint64_t begin, uint64_t end);

  inline static std::atomic<size_t> of_process_{0};  // over all endpoints
  std::map<uint64_t, Known> known_;
  uint64_t generation_ = 0;
};

}  // namespace mooncake::ascend
