// LogFMT-10, DeepEP's format of ten bits for rows on their way back: for each 128 channels the logarithms of
// their magnitudes, in 511 equal steps between the least and the largest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rows.hpp"

namespace mooncake::ep {

// A row of `width` channels, groups of 128: of each group its largest and least magnitude (two bf16); the low
// eight bits of all codes; their ninth bits and signs, two bits for a channel; and room for groups that are
// not cast, which are bf16: their first half lies where the codes would be, the rest in this room.
struct LogfmtRow {
  static constexpr size_t kMagnitudes = 4, kLow = 128, kHigh = 32, kRoom = 96;
  static size_t bytes(size_t width) { return width / 128 * (kMagnitudes + kLow + kHigh + kRoom); }
};

// bf16 rows to encoded ones: the first counts[block] of every block of `block_rows`.
void encode_logfmt(const uint16_t* from, uint8_t* to, size_t blocks, size_t block_rows, const int64_t* counts,
                   size_t width);

// As sum_bf16, of encoded addends.
void sum_logfmt(const Sum& sum);

}  // namespace mooncake::ep
