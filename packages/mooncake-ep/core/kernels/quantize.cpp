#include <algorithm>
#include <atomic>

#include "numbers.hpp"
#include "rows.hpp"

namespace mooncake::ep {

namespace {

MC_INLINE void quantize_loop(const uint16_t* from, size_t groups, bool round_scale, uint8_t* to,
                             float* scales) {
  for (size_t group = 0; group < groups; ++group, from += kGroup, to += kGroup) {
    uint16_t largest = 0;
    for (size_t i = 0; i < kGroup; ++i) largest = std::max<uint16_t>(largest, from[i] & 0x7fff);
    float amax = from_bf16(largest);
    if (amax < kSmallestAmax) amax = kSmallestAmax;
    float scale = amax / kLargestE4m3, factor = 1.0f / amax * kLargestE4m3;
    if (round_scale) {
      scale = power_of_two_above(scale);
      factor = 1.0f / scale;
    }
    scales[group] = scale;
    for (size_t i = 0; i < kGroup; ++i) to[i] = to_e4m3(from_bf16(from[i]) * factor);
  }
}

MC_INLINE void dequantize_loop(const uint8_t* from, const float* scales, size_t groups, uint16_t* to) {
  for (size_t group = 0; group < groups; ++group, from += kGroup, to += kGroup) {
    for (size_t i = 0; i < kGroup; ++i) to[i] = to_bf16(from_e4m3(from[i]) * scales[group]);
  }
}

struct Loops {
  void (*quantize)(const uint16_t*, size_t, bool, uint8_t*, float*);
  void (*dequantize)(const uint8_t*, const float*, size_t, uint16_t*);
};

void quantize_plain(const uint16_t* from, size_t groups, bool round, uint8_t* to, float* scales) {
  quantize_loop(from, groups, round, to, scales);
}
void dequantize_plain(const uint8_t* from, const float* scales, size_t groups, uint16_t* to) {
  dequantize_loop(from, scales, groups, to);
}

#if defined(__x86_64__)
MC_AVX2 void quantize_avx2(const uint16_t* from, size_t groups, bool round, uint8_t* to, float* scales) {
  quantize_loop(from, groups, round, to, scales);
}
MC_AVX2 void dequantize_avx2(const uint8_t* from, const float* scales, size_t groups, uint16_t* to) {
  dequantize_loop(from, scales, groups, to);
}
MC_AVX512 void quantize_avx512(const uint16_t* from, size_t groups, bool round, uint8_t* to, float* scales) {
  quantize_loop(from, groups, round, to, scales);
}
MC_AVX512 void dequantize_avx512(const uint8_t* from, const float* scales, size_t groups, uint16_t* to) {
  dequantize_loop(from, scales, groups, to);
}
#endif

Loops loops() {
#if defined(__x86_64__)
  if (vectors() == Vectors::kAvx512) return {quantize_avx512, dequantize_avx512};
  if (vectors() == Vectors::kAvx2) return {quantize_avx2, dequantize_avx2};
#endif
  return {quantize_plain, dequantize_plain};
}

}  // namespace

void quantize(const uint16_t* from, size_t rows, size_t width, bool round_scale, uint8_t* to, float* scales) {
  loops().quantize(from, rows * width / kGroup, round_scale, to, scales);
}

void dequantize(const uint8_t* from, const float* scales, size_t rows, size_t width, uint16_t* to) {
  loops().dequantize(from, scales, rows * width / kGroup, to);
}

namespace {

Vectors widest() {
#if defined(__x86_64__)
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
              __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (wide) return Vectors::kAvx512;
  if (__builtin_cpu_supports("avx2")) return Vectors::kAvx2;
#endif
  return Vectors::kPlain;
}

std::atomic<Vectors>& chosen() {
  static std::atomic<Vectors> vectors{widest()};
  return vectors;
}

}  // namespace

Vectors vectors() { return chosen(); }

bool use_vectors(Vectors wanted) {
  if (wanted > widest()) return false;
  chosen() = wanted;
  return true;
}

}  // namespace mooncake::ep
