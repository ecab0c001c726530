#include <algorithm>
#include <type_traits>
#include <vector>

#include "numbers.hpp"
#include "rows.hpp"

namespace mooncake::ep {

namespace {

constexpr size_t kBlock = 2048;  // columns whose sums stay in the nearest cache
constexpr size_t kTogether =
    4;  // rows that are read side by side, so that sums are loaded and stored less often

template <typename T>
MC_INLINE float widened(T value) {
  if constexpr (std::is_same_v<T, uint16_t>) return from_bf16(value);
  return value;
}

template <typename T>
MC_INLINE void add(float* sums, const void* row, size_t columns, size_t from, float weight) {
  auto* values = static_cast<const T*>(row) + from;
  for (size_t i = 0; i < columns; ++i) sums[i] += widened(values[i]) * weight;
}

template <typename T>
MC_INLINE void add_four(float* sums, const uintptr_t* rows, const float* weights, size_t columns,
                        size_t from) {
  auto* a = reinterpret_cast<const T*>(rows[0]) + from;
  auto* b = reinterpret_cast<const T*>(rows[1]) + from;
  auto* c = reinterpret_cast<const T*>(rows[2]) + from;
  auto* d = reinterpret_cast<const T*>(rows[3]) + from;
  for (size_t i = 0; i < columns; ++i) {
    float sum = sums[i] + widened(a[i]) * weights[0];
    sum += widened(b[i]) * weights[1];
    sum += widened(c[i]) * weights[2];
    sums[i] = sum + widened(d[i]) * weights[3];
  }
}

// The addends of one result that are there.
struct Present {
  std::vector<uintptr_t> rows;
  std::vector<float> weights;

  void find(const Sum& sum, size_t result) {
    rows.clear();
    weights.clear();
    for (size_t i = result * sum.most; i < (result + 1) * sum.most; ++i) {
      if (sum.addends[i] == 0) continue;
      rows.push_back(sum.addends[i]);
      weights.push_back(sum.weights == nullptr ? 1.0f : sum.weights[i]);
    }
  }
};

template <typename T>
MC_INLINE void add_all(float* sums, const Present& present, size_t columns, size_t from) {
  size_t i = 0;
  for (; i + kTogether <= present.rows.size(); i += kTogether) {
    add_four<T>(sums, &present.rows[i], &present.weights[i], columns, from);
  }
  for (; i < present.rows.size(); ++i) {
    add<T>(sums, reinterpret_cast<const void*>(present.rows[i]), columns, from, present.weights[i]);
  }
}

template <typename T>
MC_INLINE void sum_loop(const Sum& sum) {
  Present present;
  for (size_t result = 0; result < sum.count; ++result) {
    auto* out = static_cast<T*>(sum.out) + result * sum.width;
    present.find(sum, result);
    for (size_t from = 0; from < sum.width; from += kBlock) {
      size_t columns = std::min(kBlock, sum.width - from);
      float sums[kBlock];
      std::fill_n(sums, columns, 0.0f);
      for (const void* first : sum.first) {
        if (first != nullptr)
          add<T>(sums, static_cast<const T*>(first) + result * sum.width, columns, from, 1.0f);
      }
      add_all<T>(sums, present, columns, from);
      for (size_t i = 0; i < columns; ++i) {
        if constexpr (std::is_same_v<T, uint16_t>) {
          out[from + i] = to_bf16(sums[i]);
        } else {
          out[from + i] = sums[i];
        }
      }
    }
  }
}

using Loop = void (*)(const Sum&);

void sum_bf16_plain(const Sum& sum) { sum_loop<uint16_t>(sum); }
void sum_f32_plain(const Sum& sum) { sum_loop<float>(sum); }
#if defined(__x86_64__)
MC_AVX2 void sum_bf16_avx2(const Sum& sum) { sum_loop<uint16_t>(sum); }
MC_AVX2 void sum_f32_avx2(const Sum& sum) { sum_loop<float>(sum); }
MC_AVX512 void sum_bf16_avx512(const Sum& sum) { sum_loop<uint16_t>(sum); }
MC_AVX512 void sum_f32_avx512(const Sum& sum) { sum_loop<float>(sum); }
#endif

struct Loops {
  Loop bf16, f32;
};

Loops loops() {
#if defined(__x86_64__)
  if (vectors() == Vectors::kAvx512) return {sum_bf16_avx512, sum_f32_avx512};
  if (vectors() == Vectors::kAvx2) return {sum_bf16_avx2, sum_f32_avx2};
#endif
  return {sum_bf16_plain, sum_f32_plain};
}

}  // namespace

void sum_bf16(const Sum& sum) { loops().bf16(sum); }
void sum_f32(const Sum& sum) { loops().f32(sum); }

}  // namespace mooncake::ep
