// Numbers of eight and sixteen bits, converted to the bit as torch does, without branches.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

// A loop over numbers is written once and compiled for the widest vectors that processors have; which one
// runs is found out when it runs. Sums and products are the same in all of them.
#if defined(__x86_64__)
#define MC_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#define MC_AVX2 __attribute__((target("avx2")))
#endif
#define MC_INLINE inline __attribute__((always_inline))

namespace mooncake::ep {

constexpr size_t kGroup = 128;  // channels that share a scale
constexpr float kLargestE4m3 = 448.0f;
constexpr float kSmallestAmax = 1e-4f;

MC_INLINE float from_bf16(uint16_t value) { return std::bit_cast<float>(static_cast<uint32_t>(value) << 16); }

// To the nearest, ties to even.
MC_INLINE uint16_t to_bf16(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return static_cast<uint16_t>((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded);
}

// To the nearest, ties to even; what is too large becomes NaN.
MC_INLINE uint8_t to_e4m3(float value) {
  constexpr uint32_t kTooLarge = 1087u << 20;       // 480
  constexpr uint32_t kSmallestNormal = 121u << 23;  // 2^-6
  constexpr uint32_t kDenormalStep = 141u
                                     << 23;  // added as a number, it leaves the denormal's bits at the end
  uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits & 0x80000000u;
  bits ^= sign;
  uint32_t denormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(bits) + std::bit_cast<float>(kDenormalStep)) -
      kDenormalStep;
  uint32_t normal = (bits - (120u << 23) + 0x7ffff + ((bits >> 20) & 1)) >> 20;
  uint32_t found = bits >= kTooLarge ? 0x7f : bits < kSmallestNormal ? denormal : normal;
  return static_cast<uint8_t>(found | sign >> 24);
}

MC_INLINE float from_e4m3(uint8_t value) {
  uint32_t sign = static_cast<uint32_t>(value & 0x80) << 24, rest = value & 0x7f;
  // Shifted in place, it is too small by 2^120, denormals too.
  float scaled = std::bit_cast<float>(rest << 20) * std::bit_cast<float>((127u + 120u) << 23);
  uint32_t bits = rest == 0x7f ? 0x7fc00000u : std::bit_cast<uint32_t>(scaled);
  return std::bit_cast<float>(bits | sign);
}

// 2 to the power of the least whole number that is not below log2(value). Of a positive normal number.
MC_INLINE float power_of_two_above(float value) {
  uint32_t bits = std::bit_cast<uint32_t>(value);
  return std::bit_cast<float>(((bits >> 23) + ((bits & 0x7fffff) != 0)) << 23);
}

}  // namespace mooncake::ep
