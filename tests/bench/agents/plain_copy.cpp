// Copies within one process, the bound of any transfer through shared memory: memcpy and stores past the
// cache.
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Streams whole vectors; both pointers are page-aligned and sizes a multiple of 64.
void stream(char* to, const char* from, std::size_t length) {
#if defined(__AVX512F__)
  for (std::size_t at = 0; at < length; at += 64)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + at), _mm512_loadu_si512(from + at));
  _mm_sfence();
#elif defined(__x86_64__)
  for (std::size_t at = 0; at < length; at += 16)
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + at),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at)));
  _mm_sfence();
#else
  std::memcpy(to, from, length);
#endif
}

}  // namespace

// Copies `length` bytes `calls` times, each thread its share, and returns nanoseconds per copy.
extern "C" double plain_copy(char* to, const char* from, std::size_t length, int calls, int streaming,
                             int threads) {
  const auto started = std::chrono::steady_clock::now();
  const std::size_t share = length / threads / 64 * 64;
  std::vector<std::thread> others;
  auto work = [=](int index) {
    const std::size_t at = share * index;
    const std::size_t size = index + 1 == threads ? length - at : share;
    for (int call = 0; call < calls; ++call) {
      if (streaming)
        stream(to + at, from + at, size);
      else
        std::memcpy(to + at, from + at, size);
      asm volatile("" ::: "memory");  // each copy counts, also where the next one would overwrite it
    }
  };
  for (int index = 1; index < threads; ++index) others.emplace_back(work, index);
  work(0);
  for (auto& other : others) other.join();
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - started).count() / calls;
}
