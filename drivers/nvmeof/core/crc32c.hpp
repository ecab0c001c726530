// The checksum of NVMe/TCP digests (Castagnoli).
#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncake::nvmeof {

// Goes on from `crc`, which is what an earlier call returned, 0 at first.
uint32_t crc32c(uint32_t crc, const void* bytes, size_t length);

}  // namespace mooncake::nvmeof
