#include "reduce.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "half.hpp"

namespace mooncake::ep::pg {

namespace {

constexpr size_t kBlock = 1024;  // elements of one accumulator: it stays in the first-level cache

struct Bool {
  uint8_t bits;
};

// The type that an element is accumulated in.
template <typename T>
using Wide = std::conditional_t<std::is_same_v<T, Bf16> || std::is_same_v<T, F16>, float,
                                std::conditional_t<std::is_same_v<T, Bool>, uint8_t, T>>;

template <typename T>
Wide<T> widen(T value) {
  if constexpr (std::is_same_v<T, Bool>) {
    return value.bits != 0;
  } else {
    return static_cast<Wide<T>>(value);
  }
}

template <typename T>
T narrow(Wide<T> value) {
  if constexpr (std::is_same_v<T, Bf16> || std::is_same_v<T, F16>) {
    return T::from(value);
  } else if constexpr (std::is_same_v<T, Bool>) {
    return {static_cast<uint8_t>(value != 0)};
  } else {
    return value;
  }
}

// Integers wrap, as torch's do, without the compiler's licence to assume that they cannot.
template <typename W, Op op>
W combine(W left, W right) {
  using Raw = std::conditional_t<std::is_integral_v<W>, std::make_unsigned<W>, std::type_identity<W>>::type;
  if constexpr (op == Op::kSum || op == Op::kAvg || op == Op::kPremulSum) {
    return static_cast<W>(static_cast<Raw>(left) + static_cast<Raw>(right));
  } else if constexpr (op == Op::kProduct) {
    // Through 64 bits: the product of two uint16_t would be one of int, and overflow.
    if constexpr (std::is_integral_v<W>) {
      return static_cast<W>(static_cast<uint64_t>(left) * static_cast<uint64_t>(right));
    } else {
      return left * right;
    }
  } else if constexpr (op == Op::kMin || op == Op::kMax) {
    if constexpr (std::is_floating_point_v<W>) {
      if (left != left) return left;  // not a number wins, whichever side it is on
      if (right != right) return right;
    }
    return op == Op::kMin ? (right < left ? right : left) : (left < right ? right : left);
  } else if constexpr (std::is_integral_v<W>) {
    if constexpr (op == Op::kBand) return left & right;
    if constexpr (op == Op::kBor) return left | right;
    return left ^ right;
  }
}

// true + true is true, as torch has it.
template <typename T, Op op>
Wide<T> combine_of(Wide<T> left, Wide<T> right) {
  if constexpr (std::is_same_v<T, Bool> && (op == Op::kSum || op == Op::kAvg || op == Op::kPremulSum)) {
    return left | right;
  } else {
    return combine<Wide<T>, op>(left, right);
  }
}

template <typename T, Op op>
Wide<T> load(T value, double factor) {
  auto wide = widen(value);
  if constexpr (op == Op::kPremulSum && !std::is_same_v<T, Bool>) {
    if constexpr (std::is_integral_v<T>) {
      return static_cast<Wide<T>>(static_cast<double>(wide) * factor);
    } else {
      return wide * static_cast<Wide<T>>(factor);
    }
  }
  return wide;
}

template <typename T, Op op>
Wide<T> finish(Wide<T> value, size_t sources_count) {
  if constexpr (op == Op::kAvg && !std::is_same_v<T, Bool>) {
    return static_cast<Wide<T>>(value / static_cast<Wide<T>>(sources_count));
  }
  return value;
}

template <typename T, Op op>
void reduce_two(T* out, const T* left, const T* right, size_t count, double factor) {
  for (size_t i = 0; i < count; ++i) {
    auto both = combine_of<T, op>(load<T, op>(left[i], factor), load<T, op>(right[i], factor));
    out[i] = narrow<T>(finish<T, op>(both, 2));
  }
}

template <typename T, Op op>
void reduce_typed(double factor, T* out, const T* const* sources, size_t sources_count, size_t count) {
  if (sources_count == 2) return reduce_two<T, op>(out, sources[0], sources[1], count, factor);
  Wide<T> sums[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    size_t length = std::min(kBlock, count - begin);
    for (size_t i = 0; i < length; ++i) sums[i] = load<T, op>(sources[0][begin + i], factor);
    for (size_t source = 1; source < sources_count; ++source) {
      const T* values = sources[source] + begin;
      for (size_t i = 0; i < length; ++i) {
        sums[i] = combine_of<T, op>(sums[i], load<T, op>(values[i], factor));
      }
    }
    for (size_t i = 0; i < length; ++i) out[begin + i] = narrow<T>(finish<T, op>(sums[i], sources_count));
  }
}

using Reduce = void (*)(double, void*, const void* const*, size_t, size_t);

template <typename T, Op op>
void reduce_bytes(double factor, void* out, const void* const* sources, size_t sources_count, size_t count) {
  reduce_typed<T, op>(factor, static_cast<T*>(out), reinterpret_cast<const T* const*>(sources), sources_count,
                      count);
}

template <typename T>
Reduce choose_op(Op op) {
  switch (op) {
    case Op::kSum:
      return reduce_bytes<T, Op::kSum>;
    case Op::kProduct:
      return reduce_bytes<T, Op::kProduct>;
    case Op::kMin:
      return reduce_bytes<T, Op::kMin>;
    case Op::kMax:
      return reduce_bytes<T, Op::kMax>;
    case Op::kAvg:
      return reduce_bytes<T, Op::kAvg>;
    case Op::kPremulSum:
      return reduce_bytes<T, Op::kPremulSum>;
    default:
      break;
  }
  if constexpr (std::is_integral_v<Wide<T>>) {
    switch (op) {
      case Op::kBand:
        return reduce_bytes<T, Op::kBand>;
      case Op::kBor:
        return reduce_bytes<T, Op::kBor>;
      case Op::kBxor:
        return reduce_bytes<T, Op::kBxor>;
      default:
        break;
    }
  }
  return nullptr;
}

Reduce choose(Type type, Op op) {
  switch (type) {
    case Type::kU8:
      return choose_op<uint8_t>(op);
    case Type::kI8:
      return choose_op<int8_t>(op);
    case Type::kI16:
      return choose_op<int16_t>(op);
    case Type::kI32:
      return choose_op<int32_t>(op);
    case Type::kI64:
      return choose_op<int64_t>(op);
    case Type::kF16:
      return choose_op<F16>(op);
    case Type::kBf16:
      return choose_op<Bf16>(op);
    case Type::kF32:
      return choose_op<float>(op);
    case Type::kF64:
      return choose_op<double>(op);
    case Type::kBool:
      return choose_op<Bool>(op);
  }
  return nullptr;
}

}  // namespace

size_t nbytes_of(Type type) {
  constexpr size_t kSizes[] = {1, 1, 2, 4, 8, 2, 2, 4, 8, 1};
  return kSizes[static_cast<size_t>(type)];
}

bool can_reduce(Type type, Op op) { return choose(type, op) != nullptr; }

void reduce(const Reduction& reduction, void* out, const void* const* sources, size_t sources_count,
            size_t count) {
  Reduce chosen = choose(reduction.type, reduction.op);
  if (sources_count == 1 && reduction.op != Op::kPremulSum) {
    if (out != sources[0]) std::memcpy(out, sources[0], count * nbytes_of(reduction.type));
    return;
  }
  chosen(reduction.factor, out, sources, sources_count, count);
}

}  // namespace mooncake::ep::pg
