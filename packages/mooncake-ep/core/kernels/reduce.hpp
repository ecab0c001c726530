// Element-wise reductions. The order of the sources is the order of the sums, so equal sources give equal
// bits.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mooncake::ep::pg {

// As the binding numbers them; complex tensors come as their reals.
enum class Type : uint32_t { kU8, kI8, kI16, kI32, kI64, kF16, kBf16, kF32, kF64, kBool };
enum class Op : uint32_t { kSum, kProduct, kMin, kMax, kAvg, kBand, kBor, kBxor, kPremulSum };

size_t nbytes_of(Type type);
// Whether the operation means something for the type; bitwise ones do not for floats.
bool can_reduce(Type type, Op op);

struct Reduction {
  Type type;
  Op op;
  double factor = 1.0;  // of kPremulSum: every source is multiplied by it first
};

// Writes to `out` the reduction of `count` elements of each of `sources`, of which there is at least one.
// 16-bit floats are accumulated in 32 bits and rounded once; kAvg divides by the number of sources. `out` may
// be one of the sources.
void reduce(const Reduction& reduction, void* out, const void* const* sources, size_t sources_count,
            size_t count);

}  // namespace mooncake::ep::pg
