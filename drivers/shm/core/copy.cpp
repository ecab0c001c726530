#include "copy.hpp"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mooncake::shm {
namespace {

constexpr size_t kStep = 256;
// Copies a multiple of kStep bytes to a destination that is a multiple of 64.
using Kernel = void (*)(std::byte* destination, const std::byte* source, size_t length);

#if defined(__x86_64__)

__attribute__((target("avx512f"))) void stream_avx512(std::byte* destination, const std::byte* source,
                                                      size_t length) {
  for (size_t at = 0; at < length; at += kStep) {
    __m512i a = _mm512_loadu_si512(source + at);
    __m512i b = _mm512_loadu_si512(source + at + 64);
    __m512i c = _mm512_loadu_si512(source + at + 128);
    __m512i d = _mm512_loadu_si512(source + at + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + at + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + at + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(destination + at + 192), d);
  }
  // Streaming stores are not ordered with later ones: without the fence a peer could see "done" before the
  // bytes.
  _mm_sfence();
}

__attribute__((target("avx"))) void stream_avx(std::byte* destination, const std::byte* source,
                                               size_t length) {
  for (size_t at = 0; at < length; at += kStep) {
    for (size_t part = at; part < at + kStep; part += 64) {
      __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + part));
      __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + part + 32));
      _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + part), low);
      _mm256_stream_si256(reinterpret_cast<__m256i*>(destination + part + 32), high);
    }
  }
  _mm_sfence();
}

#endif

Kernel choose_kernel() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return stream_avx512;
  if (__builtin_cpu_supports("avx")) return stream_avx;
#endif
  return nullptr;
}

}  // namespace

void copy_bytes(void* destination, const void* source, size_t length, Stores stores) {
  static const Kernel stream = choose_kernel();
  auto* to = static_cast<std::byte*>(destination);
  auto* from = static_cast<const std::byte*>(source);
  if (stores == Stores::kCached || stream == nullptr || length < 2 * kStep) {
    std::memcpy(to, from, length);
    return;
  }
  size_t head = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  std::memcpy(to, from, head);
  size_t body = (length - head) / kStep * kStep;
  stream(to + head, from + head, body);
  std::memcpy(to + head + body, from + head + body, length - head - body);
}

}  // namespace mooncake::shm
