#include <algorithm>
#include <type_traits>

#include "numbers.hpp"
#include "rows.hpp"

namespace mooncake::ep {

namespace {

constexpr size_t kBlock = 512;  // columns whose sums stay in the nearest cache

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
MC_INLINE void sum_loop(const Sum& sum) {
  for (size_t result = 0; result < sum.count; ++result) {
    auto* out = static_cast<T*>(sum.out) + result * sum.width;
    const uintptr_t* addends = sum.addends + result * sum.most;
    for (size_t from = 0; from < sum.width; from += kBlock) {
      size_t columns = std::min(kBlock, sum.width - from);
      float sums[kBlock] = {};
      for (const void* first : sum.first) {
        if (first != nullptr)
          add<T>(sums, static_cast<const T*>(first) + result * sum.width, columns, from, 1.0f);
      }
      for (size_t i = 0; i < sum.most; ++i) {
        if (addends[i] == 0) continue;
        float weight = sum.weights == nullptr ? 1.0f : sum.weights[result * sum.most + i];
        add<T>(sums, reinterpret_cast<const void*>(addends[i]), columns, from, weight);
      }
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
