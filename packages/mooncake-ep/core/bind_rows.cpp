#include <array>

#include "bind.hpp"
#include "kernels/logfmt.hpp"
#include "kernels/rows.hpp"
#include "support/gil.hpp"

#include <nanobind/stl/array.h>
#include <nanobind/stl/string_view.h>

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::ep {

namespace {

constexpr const char* kVectors[] = {"plain", "avx2", "avx512"};

const char* name_of_vectors() { return kVectors[static_cast<int>(vectors())]; }

bool use_vectors_of(std::string_view name) {
  for (int i = 0; i < 3; ++i) {
    if (name == kVectors[i]) return use_vectors(static_cast<Vectors>(i));
  }
  throw nb::value_error("vectors are plain, avx2 or avx512");
}

// topk, tokens, choices, local_of
using RoutingArgs = std::array<uint64_t, 4>;
Routing routing_of(const RoutingArgs& a) {
  return {at<const int64_t>(a[0]), a[1], a[2], at<const int32_t>(a[3])};
}

// from, scales_from, row_bytes, groups, to, scales_to
using RowArgs = std::array<uint64_t, 6>;
Rows rows_of(const RowArgs& a) {
  return {at<const uint8_t>(a[0]), at<const float>(a[1]), a[2], a[3], at<uint8_t>(a[4]), at<float>(a[5])};
}

void quantize_at(uintptr_t from, size_t rows, size_t width, bool round_scale, uintptr_t to,
                 uintptr_t scales) {
  GilReleased released;
  quantize(at<const uint16_t>(from), rows, width, round_scale, at<uint8_t>(to), at<float>(scales));
}

void dequantize_at(uintptr_t from, uintptr_t scales, size_t rows, size_t width, uintptr_t to) {
  GilReleased released;
  dequantize(at<const uint8_t>(from), at<const float>(scales), rows, width, at<uint16_t>(to));
}

void sum_at(bool is_bf16, size_t count, size_t most, size_t width, uintptr_t addends, uintptr_t weights,
            uintptr_t first, uintptr_t second, uintptr_t out) {
  GilReleased released;
  Sum sum{count, most, width, at<const uintptr_t>(addends), at<const float>(weights), {}, at<void>(out)};
  sum.first[0] = at<const void>(first);
  sum.first[1] = at<const void>(second);
  is_bf16 ? sum_bf16(sum) : sum_f32(sum);
}

size_t count_at(const RoutingArgs& routing, uintptr_t per_expert) {
  GilReleased released;
  return count_tokens(routing_of(routing), at<int64_t>(per_expert));
}

void take_tokens_at(const RoutingArgs& routing, const RowArgs& rows, uintptr_t weights, uintptr_t topk_to,
                    uintptr_t weights_to, uintptr_t taken) {
  GilReleased released;
  take_tokens(routing_of(routing), rows_of(rows), at<const float>(weights), at<int64_t>(topk_to),
              at<float>(weights_to), at<int64_t>(taken));
}

void take_choices_at(const RoutingArgs& routing, const RowArgs& rows, size_t rows_of_expert, uintptr_t next,
                     uintptr_t taken) {
  GilReleased released;
  take_choices(routing_of(routing), rows_of(rows), rows_of_expert, at<int64_t>(next), at<int32_t>(taken));
}

void take_expanded_at(const RoutingArgs& routing, const RowArgs& rows, uintptr_t weights, uintptr_t next,
                      uintptr_t weights_to, uintptr_t taken) {
  GilReleased released;
  take_expanded(routing_of(routing), rows_of(rows), at<const float>(weights), at<int64_t>(next),
                at<float>(weights_to), at<int64_t>(taken));
}

void copy_blocks_at(uintptr_t from, uintptr_t to, size_t blocks, size_t block_bytes, uintptr_t counts,
                    size_t row_bytes) {
  GilReleased released;
  copy_blocks(at<const uint8_t>(from), at<uint8_t>(to), blocks, block_bytes, at<const int64_t>(counts),
              row_bytes);
}

void encode_logfmt_at(uintptr_t from, uintptr_t to, size_t blocks, size_t block_rows, uintptr_t counts,
                      size_t width) {
  GilReleased released;
  encode_logfmt(at<const uint16_t>(from), at<uint8_t>(to), blocks, block_rows, at<const int64_t>(counts),
                width);
}

void sum_logfmt_at(size_t count, size_t most, size_t width, uintptr_t addends, uintptr_t weights,
                   uintptr_t out) {
  GilReleased released;
  sum_logfmt({count, most, width, at<const uintptr_t>(addends), at<const float>(weights), {}, at<void>(out)});
}

void find_choices_at(uintptr_t topk, size_t tokens, size_t choices, uintptr_t base, size_t experts,
                     size_t row_bytes, uintptr_t addends) {
  find_choices(at<const int64_t>(topk), tokens, choices, at<const uintptr_t>(base), experts, row_bytes,
               at<uintptr_t>(addends));
}

void find_ranks_at(uintptr_t topk, size_t tokens, size_t choices, uintptr_t rank_of, uintptr_t base,
                   size_t ranks, size_t row_bytes, uintptr_t addends) {
  find_ranks(at<const int64_t>(topk), tokens, choices, at<const int32_t>(rank_of), at<const uintptr_t>(base),
             ranks, row_bytes, at<uintptr_t>(addends));
}

}  // namespace

void bind_rows(nb::module_& m) {
  m.def("vectors", &name_of_vectors, "The vectors that loops over numbers use: avx512, avx2 or plain.");
  m.def("use_vectors", &use_vectors_of, "name"_a, "Use others; False when this processor has none such.");
  m.def(
      "quantize", &quantize_at, "source"_a, "rows"_a, "width"_a, "round_scale"_a, "to"_a, "scales"_a,
      "bf16 [rows, width] to e4m3 [rows, width] and float32 scales [rows, width / 128]. All are addresses.");
  m.def("dequantize", &dequantize_at, "source"_a, "scales"_a, "rows"_a, "width"_a, "to"_a,
        "e4m3 [rows, width] times float32 scales [rows, width / 128] to bf16.");
  m.def(
      "sum_rows", &sum_at, "is_bf16"_a, "count"_a, "most"_a, "width"_a, "addends"_a, "weights"_a, "first"_a,
      "second"_a, "out"_a,
      "out [count, width]: of rows at the addresses uint64 addends [count, most], 0 for none, times float32\n"
      "weights of that shape (0: all 1), after rows of first and second [count, width] (0: none).");
  m.def("count_tokens", &count_at, "routing"_a, "per_expert"_a,
        "How many tokens have an expert there; adds to int64 per_expert.\n"
        "routing: topk, tokens, choices, local_of.");
  m.def("take_tokens", &take_tokens_at, "routing"_a, "rows"_a, "weights"_a, "topk_to"_a, "weights_to"_a,
        "taken"_a,
        "A row for every token that has an expert there. rows: from, scales_from, row_bytes, groups, to, "
        "scales_to.");
  m.def("take_choices", &take_choices_at, "routing"_a, "rows"_a, "rows_of_expert"_a, "next"_a, "taken"_a,
        "A row for every choice there, packed by expert in blocks of rows_of_expert; scales in columns.");
  m.def("take_expanded", &take_expanded_at, "routing"_a, "rows"_a, "weights"_a, "next"_a, "weights_to"_a,
        "taken"_a, "A row for every choice there, from row next[expert] on.");
  m.def("copy_blocks", &copy_blocks_at, "source"_a, "to"_a, "blocks"_a, "block_bytes"_a, "counts"_a,
        "row_bytes"_a, "The first int64 counts[block] rows of every block.");
  m.def("logfmt_bytes", &LogfmtRow::bytes, "width"_a, "Bytes of an encoded row.");
  m.def("encode_logfmt", &encode_logfmt_at, "source"_a, "to"_a, "blocks"_a, "block_rows"_a, "counts"_a,
        "width"_a, "The first int64 counts[block] bf16 rows of every block, encoded.");
  m.def("sum_logfmt", &sum_logfmt_at, "count"_a, "most"_a, "width"_a, "addends"_a, "weights"_a, "out"_a,
        "As sum_rows of bf16, of encoded rows.");
  m.def("find_choices", &find_choices_at, "topk"_a, "tokens"_a, "choices"_a, "base"_a, "experts"_a,
        "row_bytes"_a, "addends"_a,
        "Addresses [tokens, choices] of what experts return, from where the rows of each begin.");
  m.def("find_ranks", &find_ranks_at, "topk"_a, "tokens"_a, "choices"_a, "rank_of"_a, "base"_a, "ranks"_a,
        "row_bytes"_a, "addends"_a, "Addresses [tokens, ranks] of what ranks return.");
}

}  // namespace mooncake::ep
