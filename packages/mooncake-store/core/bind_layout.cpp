#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstring>
#include <string>

#include "bind.hpp"
#include "layout.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace {

using Offsets = nb::ndarray<const uint64_t, nb::shape<-1>, nb::device::cpu>;
using BlockArray = nb::ndarray<nb::numpy, uint64_t, nb::shape<-1, 3>>;

nb::list lay_out_rows(const nb::bytes& rows, const Offsets& offsets) {
  if (rows.size() % sizeof(Row) != 0) throw nb::value_error("rows must be five 64-bit integers each");
  std::vector<std::pair<uint64_t, Blocks>> found;
  // Bytes of Python need not be aligned.
  std::vector<Row> aligned(rows.size() / sizeof(Row));
  memcpy(aligned.data(), rows.c_str(), rows.size());
  std::vector<uint64_t> starts(offsets.shape(0));
  for (size_t i = 0; i < starts.size(); ++i) starts[i] = offsets(i);
  if (!lay_out(aligned.data(), aligned.size(), starts.data(), starts.size(), &found)) {
    throw nb::value_error("a row names a position beyond the offsets");
  }
  nb::list segments;
  for (auto& [segment, blocks] : found) {
    auto* kept = new Blocks(std::move(blocks));
    nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Blocks*>(p); });
    auto* numbers = reinterpret_cast<uint64_t*>(kept->data());
    segments.append(nb::make_tuple(segment, BlockArray(numbers, {kept->size(), 3}, owner)));
  }
  return segments;
}

}  // namespace

void bind_layout(nb::module_& m) {
  m.def(
      "lay_out", &lay_out_rows, "rows"_a, "offsets"_a,
      nb::sig("def lay_out(rows: bytes, offsets: NDArray[numpy.uint64]) -> "
              "list[tuple[int, NDArray[numpy.uint64]]]"),
      "For each segment its number and its blocks: N x 3 of local offset, offset in the segment, bytes.\n\n"
      "rows: of a placement (protocol.Placement). offsets: where the value at each position begins locally.\n"
      "Pieces that follow each other on both sides are one block. Raises ValueError.");
}

}  // namespace mooncake::store
