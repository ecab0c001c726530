// What dispatch and combine do to rows of activations.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncake::ep {

// bf16 [rows, width] to e4m3 and one scale for 128 channels. A scale is amax / 448, amax no less than 1e-4; a
// rounded one is the next power of two.
void quantize(const uint16_t* from, size_t rows, size_t width, bool round_scale, uint8_t* to, float* scales);
// And back: e4m3 times its scale, rounded to bf16.
void dequantize(const uint8_t* from, const float* scales, size_t rows, size_t width, uint16_t* to);

// A weighted sum of rows for each of `count` results. addends: [count, most], 0 where there is none. weights:
// [count, most], or null: all 1. first: up to two further rows of every result, added before the others.
// Sums are taken in float32 in the order of addends and rounded once.
struct Sum {
  size_t count, most, width;
  const uintptr_t* addends;
  const float* weights;
  const void* first[2];
  void* out;
};
void sum_bf16(const Sum& sum);
void sum_f32(const Sum& sum);

// The vectors that loops over numbers use; at first the widest that this processor has.
enum class Vectors { kPlain, kAvx2, kAvx512 };
Vectors vectors();
// False when this processor has no such vectors.
bool use_vectors(Vectors wanted);

// Which rows of a source go to a rank. topk: int64 [tokens, choices] of experts or -1. local_of: int32
// [experts], the local id on that rank or -1.
struct Routing {
  const int64_t* topk;
  size_t tokens, choices;
  const int32_t* local_of;
};
// How many tokens have an expert there. Adds to per_expert [local experts] how many chose each.
size_t count_tokens(const Routing& routing, int64_t* per_expert);

// Rows of activations with their scales. In a result, scale `group` of a row is at scales[row * row_stride +
// group * group_stride], with row counted in its block of `rows_of_block` rows; blocks follow each other.
struct Rows {
  const uint8_t* from;
  const float* scales_from;  // null: none
  size_t row_bytes, groups;
  uint8_t* to;
  float* scales_to;
};
// One row of every token that has an expert there, in order of token; with `taken` the token of each.
// topk_to: int64 [rows, choices], weights_to: float32, null where nobody asks.
void take_tokens(const Routing& routing, const Rows& rows, const float* weights, int64_t* topk_to,
                 float* weights_to, int64_t* taken);
// One row of every (token, expert) that is there, to the next free row of its expert: rows [local experts,
// rows_of_expert], next: [local experts]. Scales go to columns: [local experts, groups, rows_of_expert].
// taken: int32, the token of each row.
void take_choices(const Routing& routing, const Rows& rows, size_t rows_of_expert, int64_t* next,
                  int32_t* taken);
// The same where the rows of an expert begin at first[expert]; scales [rows, groups]; taken: int64 [rows].
void take_expanded(const Routing& routing, const Rows& rows, const float* weights, int64_t* next,
                   float* weights_to, int64_t* taken);

// The first rows of every block, of which there are counts[block].
void copy_blocks(const uint8_t* from, uint8_t* to, size_t blocks, size_t block_bytes, const int64_t* counts,
                 size_t row_bytes);

// Where the addends of every token are. base: of every expert (rank), where its rows for this source begin, 0
// when it has none for us.
void find_choices(const int64_t* topk, size_t tokens, size_t choices, const uintptr_t* base, size_t experts,
                  size_t row_bytes, uintptr_t* addends);
// One addend from each rank that a token went to. rank_of: int32 [experts]; addends: [tokens, ranks].
void find_ranks(const int64_t* topk, size_t tokens, size_t choices, const int32_t* rank_of,
                const uintptr_t* base, size_t ranks, size_t row_bytes, uintptr_t* addends);

}  // namespace mooncake::ep
