// Digests of keys: xxh3-128 with seed 0, by the specification of xxHash (doc/xxhash_spec.md of that
// project), for what is at least 17 bytes long. The tests compare it with the xxhash package.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncake::store {

// 16 bytes in the canonical order to `digest`.
void xxh3_128(const uint8_t* bytes, size_t length, uint8_t* digest);

// The checksum of a value: the low half of its xxh3-128, which for more than 240 bytes is its xxh3-64. A
// value below 17 bytes is filled up to 24, the last of which is its length. Never 0, which stands for none.
uint64_t value_sum(const uint8_t* bytes, size_t length);

}  // namespace mooncake::store
