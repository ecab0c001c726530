#include "block_list.hpp"

#include <sys/mman.h>

#include <limits>
#include <mutex>
#include <new>
#include <utility>

namespace mooncake {

namespace {

// From here on memory is mapped and kept. Not in huge pages: making one may take the kernel 10 ms.
constexpr size_t kLong = 1u << 20;
constexpr size_t kMostKept = 32u << 20;

// The list that was given back last. Nobody waits for the lock: who does not get it does without, as a forked
// child does whose parent held it.
struct Kept {
  std::mutex mutex;
  void* memory = nullptr;
  size_t bytes = 0;
};
Kept kept;

void* take_kept(size_t* bytes) {
  std::unique_lock lock(kept.mutex, std::try_to_lock);
  if (!lock || kept.bytes < *bytes) return nullptr;
  *bytes = std::exchange(kept.bytes, 0);
  return std::exchange(kept.memory, nullptr);
}

void* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
#ifdef MADV_POPULATE_WRITE
  // All pages in one call: touched one by one they take twice as long. Older kernels do not know it.
  (void)madvise(memory, bytes, MADV_POPULATE_WRITE);
#endif
  return memory;
}

}  // namespace

void GiveBack::operator()(Block* blocks) const {
  if (bytes < kLong) {
    operator delete(blocks);
    return;
  }
  void* memory = blocks;
  size_t size = bytes;
  if (std::unique_lock lock(kept.mutex, std::try_to_lock); lock && size <= kMostKept && size > kept.bytes) {
    std::swap(kept.memory, memory);
    std::swap(kept.bytes, size);
  }
  if (memory != nullptr) munmap(memory, size);
}

BlockList make_block_list(size_t count) {
  if (count > std::numeric_limits<size_t>::max() / 2 / sizeof(Block)) throw std::bad_alloc();
  size_t bytes = count * sizeof(Block);
  if (bytes < kLong) return BlockList(static_cast<Block*>(operator new(bytes)), {bytes});
  void* memory = take_kept(&bytes);
  if (memory == nullptr) memory = map(bytes);
  return BlockList(static_cast<Block*>(memory), {bytes});
}

}  // namespace mooncake
