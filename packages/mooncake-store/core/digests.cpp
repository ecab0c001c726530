#include "digests.hpp"

#include <array>
#include <bit>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mooncake::store {

namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kPrime32a = 0x9E3779B1u, kPrime32b = 0x85EBCA77u, kPrime32c = 0xC2B2AE3Du;
constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87u, kPrime2 = 0xC2B2AE3D27D4EB4Fu;
constexpr uint64_t kPrime3 = 0x165667B19E3779F9u, kPrime4 = 0x85EBCA77C2B2AE63u;
constexpr uint64_t kPrime5 = 0x27D4EB2F165667C5u;

constexpr uint8_t kSecret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

struct Sums {
  uint64_t low, high;
};

uint64_t word(const uint8_t* at) {
  uint64_t value;
  std::memcpy(&value, at, sizeof(value));
  return value;
}

uint64_t folded(uint64_t left, uint64_t right) {
  auto product = static_cast<unsigned __int128>(left) * right;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t avalanche(uint64_t value) {
  value ^= value >> 37;
  value *= 0x165667919E3779F9u;
  return value ^ value >> 32;
}

uint64_t mixed16(const uint8_t* bytes, const uint8_t* secret) {
  return folded(word(bytes) ^ word(secret), word(bytes + 8) ^ word(secret + 8));
}

void mix32(Sums& sums, const uint8_t* first, const uint8_t* second, const uint8_t* secret) {
  sums.low = (sums.low + mixed16(first, secret)) ^ (word(second) + word(second + 8));
  sums.high = (sums.high + mixed16(second, secret + 16)) ^ (word(first) + word(first + 8));
}

Sums finished(const Sums& sums, size_t length) {
  uint64_t high = sums.low * kPrime1 + sums.high * kPrime4 + length * kPrime2;
  return {avalanche(sums.low + sums.high), 0 - avalanche(high)};
}

// 17 to 128 bytes.
Sums short_sums(const uint8_t* bytes, size_t length) {
  Sums sums{length * kPrime1, 0};
  for (size_t i = (length - 1) / 32 + 1; i-- != 0;) {
    mix32(sums, bytes + 16 * i, bytes + length - 16 * (i + 1), kSecret + 32 * i);
  }
  return finished(sums, length);
}

// 129 to 240 bytes.
Sums middle_sums(const uint8_t* bytes, size_t length) {
  Sums sums{length * kPrime1, 0};
  size_t at = 0;
  for (; at < 128; at += 32) mix32(sums, bytes + at, bytes + at + 16, kSecret + at);
  sums = {avalanche(sums.low), avalanche(sums.high)};
  for (; at + 32 <= length; at += 32) mix32(sums, bytes + at, bytes + at + 16, kSecret + 3 + at - 128);
  mix32(sums, bytes + length - 16, bytes + length - 32, kSecret + 103);
  return finished(sums, length);
}

using Lanes = std::array<uint64_t, 8>;

void accumulate(Lanes& lanes, const uint8_t* stripe, const uint8_t* secret) {
  for (size_t i = 0; i < lanes.size(); ++i) {
    uint64_t value = word(stripe + 8 * i), key = value ^ word(secret + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += (key & 0xffffffffu) * (key >> 32);
  }
}

uint64_t merged(const Lanes& lanes, const uint8_t* secret, uint64_t start) {
  for (size_t i = 0; i < lanes.size(); i += 2) {
    start += folded(lanes[i] ^ word(secret + 8 * i), lanes[i + 1] ^ word(secret + 8 * i + 8));
  }
  return avalanche(start);
}

#if defined(__x86_64__)
#define AVX2 __attribute__((target("avx2"))) inline
using Four = __m256i;

AVX2 Four load(const void* at) { return _mm256_loadu_si256(static_cast<const Four*>(at)); }

AVX2 void add_to(Four& sum, const uint8_t* bytes, const uint8_t* secret) {
  Four value = load(bytes), key = _mm256_xor_si256(value, load(secret));
  Four product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  // Each value goes to the lane beside its own.
  sum = _mm256_add_epi64(_mm256_add_epi64(sum, _mm256_shuffle_epi32(value, 0x4e)), product);
}

AVX2 void scramble(Four& sum, const uint8_t* secret) {
  Four prime = _mm256_set1_epi64x(static_cast<int64_t>(kPrime32a));
  sum = _mm256_xor_si256(_mm256_xor_si256(sum, _mm256_srli_epi64(sum, 47)), load(secret));
  Four top = _mm256_slli_epi64(_mm256_mul_epu32(_mm256_srli_epi64(sum, 32), prime), 32);
  sum = _mm256_add_epi64(_mm256_mul_epu32(sum, prime), top);
}

// As the loop of long_sums, for whole blocks of 1 KiB, four lanes at a time.
AVX2 void add_blocks(Lanes& lanes, const uint8_t* bytes, size_t blocks) {
  Four low = load(lanes.data()), high = load(lanes.data() + 4);
  for (; blocks != 0; --blocks) {
    for (size_t stripe = 0; stripe < 16; ++stripe, bytes += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(bytes + 512), _MM_HINT_T0);
      add_to(low, bytes, kSecret + 8 * stripe);
      add_to(high, bytes + 32, kSecret + 8 * stripe + 32);
    }
    scramble(low, kSecret + 128);
    scramble(high, kSecret + 160);
  }
  _mm256_storeu_si256(reinterpret_cast<Four*>(lanes.data()), low);
  _mm256_storeu_si256(reinterpret_cast<Four*>(lanes.data() + 4), high);
}
#undef AVX2
#endif

// How much of `bytes`, whose last stripe comes afterwards, was added at once.
size_t add_quickly(Lanes& lanes, const uint8_t* bytes, size_t end) {
#if defined(__x86_64__)
  static const bool able = __builtin_cpu_supports("avx2");
  if (able) {
    add_blocks(lanes, bytes, end / 1024);
    return end / 1024 * 1024;
  }
#endif
  (void)lanes, (void)bytes, (void)end;
  return 0;
}

// More than 240 bytes.
Sums long_sums(const uint8_t* bytes, size_t length) {
  constexpr size_t kStripe = 64, kBlock = 16 * kStripe;
  Lanes lanes{kPrime32c, kPrime1, kPrime2, kPrime3, kPrime4, kPrime32b, kPrime5, kPrime32a};
  size_t end = (length - 1) / kStripe * kStripe;
  for (size_t at = add_quickly(lanes, bytes, end); at < end; at += kStripe) {
    accumulate(lanes, bytes + at, kSecret + at % kBlock / 8);
    if ((at + kStripe) % kBlock != 0) continue;
    for (size_t i = 0; i < lanes.size(); ++i) {
      lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ word(kSecret + 128 + 8 * i)) * kPrime32a;
    }
  }
  accumulate(lanes, bytes + length - kStripe, kSecret + 121);
  return {merged(lanes, kSecret + 11, length * kPrime1), merged(lanes, kSecret + 117, ~(length * kPrime2))};
}

}  // namespace

static Sums sums_of(const uint8_t* bytes, size_t length) {
  return length <= 128   ? short_sums(bytes, length)
         : length <= 240 ? middle_sums(bytes, length)
                         : long_sums(bytes, length);
}

uint64_t value_sum(const uint8_t* bytes, size_t length) {
  std::array<uint8_t, 24> filled{};
  if (length < 17) {
    if (length != 0) std::memcpy(filled.data(), bytes, length);
    filled.back() = static_cast<uint8_t>(length);
    bytes = filled.data(), length = filled.size();
  }
  uint64_t sum = sums_of(bytes, length).low;
  return sum == 0 ? 1 : sum;
}

void xxh3_128(const uint8_t* bytes, size_t length, uint8_t* digest) {
  Sums sums = sums_of(bytes, length);
  sums = {__builtin_bswap64(sums.high), __builtin_bswap64(sums.low)};
  std::memcpy(digest, &sums, sizeof(sums));
}

}  // namespace mooncake::store
