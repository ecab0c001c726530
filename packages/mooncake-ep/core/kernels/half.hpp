// 16-bit floats as 32-bit ones and back, rounded to nearest even.
#pragma once

#include <bit>
#include <cstdint>

#include "numbers.hpp"

namespace mooncake::ep::pg {

struct Bf16 {
  uint16_t bits;
  explicit operator float() const { return from_bf16(bits); }
  static Bf16 from(float value) { return {to_bf16(value)}; }
};

struct F16 {
  uint16_t bits;
  // Shifts the exponent by a product with a power of two, which also makes subnormal numbers right.
  explicit operator float() const {
    uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
    uint32_t rest = static_cast<uint32_t>(bits & 0x7fff) << 13;
    bool special = (bits & 0x7c00) == 0x7c00;
    uint32_t scaled = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) * std::bit_cast<float>(0x77800000u));
    return std::bit_cast<float>(sign | (special ? rest | 0x7f800000 : scaled));
  }
  static F16 from(float value) {
    uint32_t raw = std::bit_cast<uint32_t>(value);
    uint32_t sign = (raw >> 16) & 0x8000;
    uint32_t rest = raw & 0x7fffffff;
    uint32_t normal = (rest - 0x38000000 + 0xfff + ((rest >> 13) & 1)) >> 13;
    // Adding 0.5 leaves the subnormal's bits at the end of the mantissa, rounded by the processor.
    uint32_t small = std::bit_cast<uint32_t>(std::bit_cast<float>(rest) + 0.5f) - 0x3f000000;
    uint32_t finite = rest < 0x38800000 ? small : normal;
    uint32_t large = rest > 0x7f800000 ? 0x7e00 : 0x7c00;
    return {static_cast<uint16_t>(sign | (rest >= 0x477ff000 ? large : finite))};
  }
};

}  // namespace mooncake::ep::pg
