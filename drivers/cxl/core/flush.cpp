#include "flush.hpp"

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace mooncake::cxl {
namespace {

constexpr uintptr_t kLineBytes = 64;

#if defined(__x86_64__)

// Leaf 7 of cpuid, EBX. CLFLUSH itself is part of every 64-bit processor.
constexpr unsigned kClflushopt = 1u << 23;
constexpr unsigned kClwb = 1u << 24;

unsigned features() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 ? b : 0;
}

using LineByLine = void (*)(uintptr_t first, uintptr_t end);

__attribute__((target("clwb"))) void by_clwb(uintptr_t first, uintptr_t end) {
  for (uintptr_t line = first; line < end; line += kLineBytes) _mm_clwb(reinterpret_cast<void*>(line));
}
__attribute__((target("clflushopt"))) void by_clflushopt(uintptr_t first, uintptr_t end) {
  for (uintptr_t line = first; line < end; line += kLineBytes) _mm_clflushopt(reinterpret_cast<void*>(line));
}
void by_clflush(uintptr_t first, uintptr_t end) {
  for (uintptr_t line = first; line < end; line += kLineBytes) _mm_clflush(reinterpret_cast<void*>(line));
}

LineByLine dropper() { return (features() & kClflushopt) != 0 ? by_clflushopt : by_clflush; }
LineByLine writer() { return (features() & kClwb) != 0 ? by_clwb : dropper(); }

#elif defined(__aarch64__)

using LineByLine = void (*)(uintptr_t first, uintptr_t end);

// Linux lets programs use both; to the point of coherency, which is where other masters of memory look.
void by_cvac(uintptr_t first, uintptr_t end) {
  for (uintptr_t line = first; line < end; line += kLineBytes)
    asm volatile("dc cvac, %0" ::"r"(line) : "memory");
  asm volatile("dsb sy" ::: "memory");
}
void by_civac(uintptr_t first, uintptr_t end) {
  for (uintptr_t line = first; line < end; line += kLineBytes)
    asm volatile("dc civac, %0" ::"r"(line) : "memory");
  asm volatile("dsb sy" ::: "memory");
}

LineByLine dropper() { return by_civac; }
LineByLine writer() { return by_cvac; }

#else

using LineByLine = void (*)(uintptr_t first, uintptr_t end);
LineByLine dropper() { return nullptr; }
LineByLine writer() { return nullptr; }

#endif

void each_line(LineByLine work, const void* address, size_t length) {
  auto first = reinterpret_cast<uintptr_t>(address) & ~(kLineBytes - 1);
  work(first, reinterpret_cast<uintptr_t>(address) + length);
}

}  // namespace

bool can_flush() { return dropper() != nullptr; }

void full_fence() {
#if defined(__x86_64__)
  _mm_mfence();
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

void write_back(const void* address, size_t length) {
  static const LineByLine work = writer();
  each_line(work, address, length);
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void drop_lines(const void* address, size_t length) {
  static const LineByLine work = dropper();
#if defined(__x86_64__)
  _mm_mfence();  // CLFLUSHOPT is ordered with stores and loads by fences only
#endif
  each_line(work, address, length);
#if defined(__x86_64__)
  _mm_mfence();
#endif
}

}  // namespace mooncake::cxl
