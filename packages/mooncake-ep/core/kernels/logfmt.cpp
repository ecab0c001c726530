#include "logfmt.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "numbers.hpp"

namespace mooncake::ep {

namespace {

constexpr int kSteps = 510;          // between the least and the largest of 511 codes; code 0 is zero
constexpr float kWidest = 32.0f;     // a least magnitude is 2^-32 of the largest, or more
constexpr size_t kBlockGroups = 16;  // whose sums stay in the nearest cache

// log2 of the mantissas of bf16, 1 to 2.
const std::array<float, 128>& mantissa_logarithms() {
  static const auto table = [] {
    std::array<float, 128> found{};
    for (size_t i = 0; i < found.size(); ++i) {
      found[i] = static_cast<float>(std::log2(1.0 + static_cast<double>(i) / 128));
    }
    return found;
  }();
  return table;
}

// Of a magnitude; subnormal ones count as zero, whose logarithm is this.
constexpr float kLogOfZero = -1e6f;
MC_INLINE float logarithm(uint16_t magnitude, const float* mantissas) {
  float found = static_cast<float>((magnitude >> 7) - 127) + mantissas[magnitude & 0x7f];
  return magnitude < 0x80 ? kLogOfZero : found;
}

// 2^y for y up to 0, and 0 below the normal numbers. The polynomial is 2^f for f from 0 to 1 with a relative
// error below 2e-7, fitted at Chebyshev's points.
MC_INLINE float power(float y) {
  int32_t whole = static_cast<int32_t>(y);
  whole -= y < static_cast<float>(whole);
  float f = y - static_cast<float>(whole);
  float p = 0.0018775766f;
  p = p * f + 0.0089893406f;
  p = p * f + 0.055826318f;
  p = p * f + 0.24015361f;
  p = p * f + 0.69315308f;
  p = p * f + 0.99999994f;
  int32_t exponent = std::max(whole + 127, 0) << 23;
  float scale = std::bit_cast<float>(exponent);
  return scale * p;
}

// How the codes of a group are to be read.
struct Scale {
  float least = 0, step = 0;
  bool cast = false;
};

MC_INLINE Scale scale_of(uint16_t largest, uint16_t least, const float* mantissas) {
  float high = logarithm(largest, mantissas);
  float low = std::max(logarithm(least, mantissas), high - kWidest);
  // As DeepEP has it, rows with magnitudes of 1 or more are not cast, nor are those of one magnitude.
  if (!(high > kLogOfZero && high < 0 && low < high)) return {};
  return {low, (high - low) / kSteps, true};
}

MC_INLINE void encode_group(const uint16_t* from, uint8_t* magnitudes, uint8_t* low, uint8_t* high,
                            uint8_t* room, const float* mantissas) {
  uint16_t largest = 0, least = 0x7f80;
  for (size_t i = 0; i < kGroup; ++i) {
    uint16_t magnitude = from[i] & 0x7fff;
    largest = std::max(largest, magnitude);
    least = std::min(least, magnitude);
  }
  std::memcpy(magnitudes, &largest, 2);
  std::memcpy(magnitudes + 2, &least, 2);
  Scale scale = scale_of(largest, least, mantissas);
  if (!scale.cast) {
    auto* bytes = reinterpret_cast<const uint8_t*>(from);
    std::memcpy(low, bytes, LogfmtRow::kLow);
    std::memcpy(high, bytes + LogfmtRow::kLow, LogfmtRow::kHigh);
    std::memcpy(room, bytes + LogfmtRow::kLow + LogfmtRow::kHigh, LogfmtRow::kRoom);
    return;
  }
  // Codes meet in the middle between two magnitudes, not between their logarithms: with s for the step,
  // log2((1 + 2^s) / 2) / s = 1/2 + (ln 2) s / 8 - (ln 2)^3 s^3 / 192 and less than 1e-10 more.
  float s = scale.step, inverse = 1.0f / s;
  float rounding = 2.0f - (0.5f + s * 0.086643398f - s * s * s * 0.0017344977f);
  uint16_t codes[kGroup];
  for (size_t i = 0; i < kGroup; ++i) {
    float place = (logarithm(from[i] & 0x7fff, mantissas) - scale.least) * inverse + rounding;
    auto code = static_cast<int32_t>(std::min(std::max(place, 0.0f), 511.0f));
    codes[i] = static_cast<uint16_t>(code | (from[i] >> 15) << 9);
  }
  for (size_t i = 0; i < kGroup; ++i) low[i] = static_cast<uint8_t>(codes[i]);
  for (size_t i = 0; i < LogfmtRow::kHigh; ++i) {
    uint32_t bits = 0;
    for (size_t part = 0; part < 4; ++part) bits |= (codes[i + 32 * part] >> 8 & 3u) << (2 * part);
    high[i] = static_cast<uint8_t>(bits);
  }
}

MC_INLINE void encode_row(const uint16_t* from, uint8_t* to, size_t groups, const float* mantissas) {
  uint8_t* low = to + groups * LogfmtRow::kMagnitudes;
  uint8_t* high = low + groups * LogfmtRow::kLow;
  uint8_t* room = high + groups * LogfmtRow::kHigh;
  for (size_t g = 0; g < groups; ++g) {
    encode_group(from + g * kGroup, to + g * LogfmtRow::kMagnitudes, low + g * LogfmtRow::kLow,
                 high + g * LogfmtRow::kHigh, room + g * LogfmtRow::kRoom, mantissas);
  }
}

MC_INLINE void add_cast(float* sums, const uint8_t* low, const uint8_t* high, Scale scale, float weight) {
  int32_t codes[kGroup];
  uint32_t signs[kGroup];
  for (size_t i = 0; i < kGroup; ++i) codes[i] = low[i];
  for (size_t part = 0; part < 4; ++part) {
    for (size_t i = 0; i < LogfmtRow::kHigh; ++i) {
      uint32_t bits = static_cast<uint32_t>(high[i]) >> (2 * part);
      codes[32 * part + i] |= static_cast<int32_t>((bits & 1) << 8);
      signs[32 * part + i] = (bits & 2) << 30;
    }
  }
  for (size_t i = 0; i < kGroup; ++i) {
    float value = power(scale.least + static_cast<float>(codes[i] - 1) * scale.step);
    uint32_t is_there = codes[i] == 0 ? 0 : ~0u;
    sums[i] += std::bit_cast<float>((std::bit_cast<uint32_t>(value) & is_there) | signs[i]) * weight;
  }
}

MC_INLINE void add_group(float* sums, const uint8_t* row, size_t groups, size_t g, float weight,
                         const float* mantissas) {
  const uint8_t* low = row + groups * LogfmtRow::kMagnitudes;
  const uint8_t* high = low + groups * LogfmtRow::kLow;
  const uint8_t* room = high + groups * LogfmtRow::kHigh + g * LogfmtRow::kRoom;
  low += g * LogfmtRow::kLow;
  high += g * LogfmtRow::kHigh;
  uint16_t magnitudes[2];
  std::memcpy(magnitudes, row + g * LogfmtRow::kMagnitudes, 4);
  Scale scale = scale_of(magnitudes[0], magnitudes[1], mantissas);
  if (scale.cast) return add_cast(sums, low, high, scale, weight);
  uint16_t values[kGroup];
  auto* bytes = reinterpret_cast<uint8_t*>(values);
  std::memcpy(bytes, low, LogfmtRow::kLow);
  std::memcpy(bytes + LogfmtRow::kLow, high, LogfmtRow::kHigh);
  std::memcpy(bytes + LogfmtRow::kLow + LogfmtRow::kHigh, room, LogfmtRow::kRoom);
  for (size_t i = 0; i < kGroup; ++i) sums[i] += from_bf16(values[i]) * weight;
}

MC_INLINE void sum_loop(const Sum& sum, const float* mantissas) {
  size_t groups = sum.width / kGroup;
  for (size_t result = 0; result < sum.count; ++result) {
    auto* out = static_cast<uint16_t*>(sum.out) + result * sum.width;
    for (size_t first = 0; first < groups; first += kBlockGroups) {
      size_t here = std::min(kBlockGroups, groups - first);
      float sums[kBlockGroups * kGroup] = {};
      for (size_t i = result * sum.most; i < (result + 1) * sum.most; ++i) {
        if (sum.addends[i] == 0) continue;
        float weight = sum.weights == nullptr ? 1.0f : sum.weights[i];
        auto* row = reinterpret_cast<const uint8_t*>(sum.addends[i]);
        for (size_t g = 0; g < here; ++g) {
          add_group(sums + g * kGroup, row, groups, first + g, weight, mantissas);
        }
      }
      for (size_t i = 0; i < here * kGroup; ++i) out[first * kGroup + i] = to_bf16(sums[i]);
    }
  }
}

using Encode = void (*)(const uint16_t*, uint8_t*, size_t, const float*);
using SumAll = void (*)(const Sum&, const float*);

void encode_plain(const uint16_t* from, uint8_t* to, size_t groups, const float* logarithms) {
  encode_row(from, to, groups, logarithms);
}
void sum_plain(const Sum& sum, const float* logarithms) { sum_loop(sum, logarithms); }

#if defined(__x86_64__)
MC_AVX2 void encode_avx2(const uint16_t* from, uint8_t* to, size_t groups, const float* logarithms) {
  encode_row(from, to, groups, logarithms);
}
MC_AVX512 void encode_avx512(const uint16_t* from, uint8_t* to, size_t groups, const float* logarithms) {
  encode_row(from, to, groups, logarithms);
}
MC_AVX2 void sum_avx2(const Sum& sum, const float* logarithms) { sum_loop(sum, logarithms); }
MC_AVX512 void sum_avx512(const Sum& sum, const float* logarithms) { sum_loop(sum, logarithms); }
#endif

struct Loops {
  Encode encode;
  SumAll sum;
};

Loops loops() {
#if defined(__x86_64__)
  if (vectors() == Vectors::kAvx512) return {encode_avx512, sum_avx512};
  if (vectors() == Vectors::kAvx2) return {encode_avx2, sum_avx2};
#endif
  return {encode_plain, sum_plain};
}

}  // namespace

void encode_logfmt(const uint16_t* from, uint8_t* to, size_t blocks, size_t block_rows, const int64_t* counts,
                   size_t width) {
  Encode encode = loops().encode;
  const float* logarithms = mantissa_logarithms().data();
  size_t bytes = LogfmtRow::bytes(width);
  for (size_t block = 0; block < blocks; ++block) {
    for (size_t row = block * block_rows; row < block * block_rows + static_cast<size_t>(counts[block]);
         ++row) {
      encode(from + row * width, to + row * bytes, width / kGroup, logarithms);
    }
  }
}

void sum_logfmt(const Sum& sum) { loops().sum(sum, mantissa_logarithms().data()); }

}  // namespace mooncake::ep
