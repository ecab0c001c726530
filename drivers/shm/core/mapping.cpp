#include "mapping.hpp"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace mooncake::shm {

Status Mapping::open(int fd, uint64_t offset, uint64_t length, bool writable,
                     std::shared_ptr<Mapping>& mapping) {
  if (!sealed_against_shrinking(fd)) {
    return failed(MC_UNSUPPORTED, "the memory's file is not sealed against shrinking (F_SEAL_SHRINK)");
  }
  struct stat file{};
  if (fstat(fd, &file) != 0) return system_failure(MC_IO, "cannot stat the memory's file", errno);
  uint64_t size = static_cast<uint64_t>(file.st_size);
  if (offset > size || length > size - offset) {
    return failed(MC_UNSUPPORTED, "the memory's file ends before the region does");
  }
  // Huge-page files must be mapped at multiples of their own page size, which they report as block size.
  uint64_t page = std::max<uint64_t>(static_cast<uint64_t>(sysconf(_SC_PAGESIZE)),
                                     static_cast<uint64_t>(std::max<blksize_t>(file.st_blksize, 1)));
  uint64_t skipped = offset % page;
  int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
  void* base =
      mmap(nullptr, length + skipped, protection, MAP_SHARED, fd, static_cast<off_t>(offset - skipped));
  if (base == MAP_FAILED) return system_failure(MC_UNSUPPORTED, "cannot map the peer's memory", errno);
  // A forked child takes no part in the driver, and must not keep a peer's memory alive.
  madvise(base, length + skipped, MADV_DONTFORK);
  // Has an effect where the system's policy for shared memory is "advise".
  madvise(base, length + skipped, MADV_HUGEPAGE);
  mapping.reset(new Mapping(base, length + skipped, skipped));
  return {};
}

size_t Mapping::populate(size_t from, size_t length) const {
  size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  size_t end = std::min(from + length, mapped_bytes_);
  auto* base = static_cast<std::byte*>(base_);
  std::vector<unsigned char> resident((end - from + page - 1) / page);
  if (mincore(base + from, end - from, resident.data()) != 0) return mapped_bytes_;
  for (size_t first = 0; first < resident.size();) {
    size_t last = first;
    while (last < resident.size() && (resident[last] & 1) != 0) ++last;
    if (last > first) {
      size_t bytes = std::min((last - first) * page, end - from - first * page);
      // Reading suffices for writable mappings too: pages of shared memory are entered as writable at once.
      if (madvise(base + from + first * page, bytes, MADV_POPULATE_READ) != 0) return mapped_bytes_;
    }
    first = last + 1;
  }
  return end;
}

Mapping::~Mapping() { munmap(base_, mapped_bytes_); }

}  // namespace mooncake::shm
