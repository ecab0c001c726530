#include "crc32c.hpp"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mooncake::nvmeof {
namespace {

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t value = i;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1) != 0 ? 0x82f63b78u : 0u);
    table[i] = value;
  }
  return table;
}

uint32_t by_table(uint32_t crc, const uint8_t* bytes, size_t length) {
  static constexpr std::array<uint32_t, 256> kTable = make_table();
  for (size_t i = 0; i < length; ++i) crc = kTable[(crc ^ bytes[i]) & 0xff] ^ (crc >> 8);
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t by_instruction(uint32_t crc, const uint8_t* bytes, size_t length) {
  uint64_t wide = crc;
  for (; length >= 8; bytes += 8, length -= 8) {
    uint64_t word;
    std::memcpy(&word, bytes, sizeof word);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; length > 0; ++bytes, --length) crc = _mm_crc32_u8(crc, *bytes);
  return crc;
}
#endif

}  // namespace

uint32_t crc32c(uint32_t crc, const void* bytes, size_t length) {
  const auto* data = static_cast<const uint8_t*>(bytes);
#if defined(__x86_64__)
  static const bool fast = __builtin_cpu_supports("sse4.2");
  if (fast) return ~by_instruction(~crc, data, length);
#endif
  return ~by_table(~crc, data, length);
}

}  // namespace mooncake::nvmeof
