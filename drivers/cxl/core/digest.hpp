// Checksums of what lies in the pool, and digests of keys, which must not lie there themselves.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace mooncake::cxl {

using Digest = std::array<uint8_t, 32>;

// SHA-256 (FIPS 180-4).
Digest sha256(const void* bytes, size_t length);

// CRC-32C, over several pieces when the result of one is the `seed` of the next.
uint32_t crc32c(const void* bytes, size_t length, uint32_t seed = 0);

}  // namespace mooncake::cxl
