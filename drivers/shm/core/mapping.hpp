// A peer's memory, mapped into this process.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "os.hpp"

namespace mooncake::shm {

class Mapping {
 public:
  // Maps `length` bytes of a memfd from `offset`, which need not be a multiple of the page size.
  // MC_UNSUPPORTED when the memfd could shrink or is too short.
  static Status open(int fd, uint64_t offset, uint64_t length, bool writable,
                     std::shared_ptr<Mapping>& mapping);

  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  std::byte* data() const { return data_; }

  // Enters into this process's page tables what of [from, from + length) its owner has in memory, so that the
  // first copies need no page faults. What the owner never touched stays unallocated. Returns where to go on;
  // mapped_bytes() at the end.
  size_t populate(size_t from, size_t length) const;
  size_t mapped_bytes() const { return mapped_bytes_; }

 private:
  Mapping(void* base, size_t mapped_bytes, size_t skipped_bytes)
      : base_(base), mapped_bytes_(mapped_bytes), data_(static_cast<std::byte*>(base) + skipped_bytes) {}

  void* base_;
  size_t mapped_bytes_;
  std::byte* data_;
};

}  // namespace mooncake::shm
