// Preloaded, it counts what the code of one shared object allocates: in all threads, by C++ and by C.
#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

namespace {

std::atomic<uintptr_t> first{0}, end{0};
std::atomic<uint64_t> counted{0};

void count(const void* caller) {
  auto at = reinterpret_cast<uintptr_t>(caller);
  if (at >= first.load(std::memory_order_relaxed) && at < end.load(std::memory_order_relaxed))
    counted.fetch_add(1, std::memory_order_relaxed);
}

int look(dl_phdr_info* info, size_t, void* wanted) {
  if (std::strcmp(info->dlpi_name, static_cast<const char*>(wanted)) != 0) return 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
    first = info->dlpi_addr + segment.p_vaddr;
    end = first + segment.p_memsz;
  }
  return 1;
}

}  // namespace

extern "C" {
void* __libc_malloc(size_t size);
void* __libc_calloc(size_t items, size_t size);
void* __libc_realloc(void* made, size_t size);

// False when no such object is loaded.
bool count_allocations_of(const char* path) { return dl_iterate_phdr(look, const_cast<char*>(path)) == 1; }
uint64_t counted_allocations() { return counted.load(std::memory_order_relaxed); }

void* malloc(size_t size) {
  count(__builtin_return_address(0));
  return __libc_malloc(size);
}
void* calloc(size_t items, size_t size) {
  count(__builtin_return_address(0));
  return __libc_calloc(items, size);
}
void* realloc(void* made, size_t size) {
  count(__builtin_return_address(0));
  return __libc_realloc(made, size);
}
}

void* operator new(size_t size) {
  count(__builtin_return_address(0));
  if (void* made = __libc_malloc(size != 0 ? size : 1)) return made;
  throw std::bad_alloc();
}
void* operator new[](size_t size) {
  count(__builtin_return_address(0));
  if (void* made = __libc_malloc(size != 0 ? size : 1)) return made;
  throw std::bad_alloc();
}
