#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "best_fit.hpp"
#include "bind.hpp"
#include "eviction_queue.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace {

using Numbers = nb::ndarray<const uint64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
using Pieces = std::vector<std::pair<uint64_t, uint64_t>>;

void init_best_fit(BestFit* self, uint64_t capacity_bytes, uint64_t granule_bytes) {
  if (granule_bytes == 0 || (granule_bytes & (granule_bytes - 1)) != 0) {
    throw nb::value_error(
        ("granule_bytes is " + std::to_string(granule_bytes) + "; it must be a power of two").c_str());
  }
  new (self) BestFit(capacity_bytes, granule_bytes);
}

std::optional<Pieces> allocate(BestFit& self, uint64_t nbytes, size_t max_pieces) {
  auto pieces = self.allocate(nbytes, max_pieces);
  if (!pieces) return std::nullopt;
  Pieces pairs;
  for (const Piece& piece : *pieces) pairs.emplace_back(piece.offset, piece.nbytes);
  return pairs;
}

void free_piece(BestFit& self, uint64_t offset, uint64_t nbytes) {
  switch (self.free(offset, nbytes)) {
    case BestFit::Freed::kOk:
      return;
    case BestFit::Freed::kUnknown:
      throw nb::key_error(("no piece begins at " + std::to_string(offset)).c_str());
    case BestFit::Freed::kOtherSize:
      throw nb::value_error(
          ("the piece at " + std::to_string(offset) + " has not " + std::to_string(nbytes) + " bytes")
              .c_str());
  }
}

using Extents = nb::typed<nb::dict, uint64_t, uint64_t>;

Extents live_extents(const BestFit& self) {
  Extents extents;
  for (const Piece& piece : self.live()) extents[nb::int_(piece.offset)] = nb::int_(piece.nbytes);
  return extents;
}

std::unique_ptr<EvictionQueue> make_queue(const std::string& policy) {
  auto queue = EvictionQueue::make(policy);
  if (queue == nullptr) throw nb::value_error(("there is no eviction policy '" + policy + "' here").c_str());
  return queue;
}

void insert(EvictionQueue& self, const Numbers& ids, const Numbers& keys, const Numbers& nbytes) {
  if (keys.shape(0) != ids.shape(0) || nbytes.shape(0) != ids.shape(0)) {
    throw nb::value_error("ids, keys and nbytes must have one length");
  }
  for (size_t i = 0; i < ids.shape(0); ++i) {
    if (!self.insert(ids(i), keys(i), nbytes(i))) {
      throw nb::value_error(("id " + std::to_string(ids(i)) + " is in the queue already").c_str());
    }
  }
}

template <bool (EvictionQueue::*Step)(uint64_t)>
void for_each(EvictionQueue& self, const Numbers& ids) {
  for (size_t i = 0; i < ids.shape(0); ++i) {
    if (!(self.*Step)(ids(i))) {
      const char* what = self.contains(ids(i)) ? " is not pinned" : " is not in the queue";
      throw nb::key_error(("id " + std::to_string(ids(i)) + what).c_str());
    }
  }
}

void bind_best_fit(nb::module_& m) {
  nb::class_<BestFit>(m, "BestFit",
                      "Free space of one segment, in pieces of whole granules. Not thread-safe.")
      .def("__init__", &init_best_fit, "capacity_bytes"_a, "granule_bytes"_a)
      .def_prop_ro("granule_bytes", &BestFit::granule_bytes)
      .def_prop_ro("capacity_bytes", &BestFit::capacity_bytes, "Whole granules.")
      .def_prop_ro("free_bytes", &BestFit::free_bytes)
      .def_prop_ro("largest_hole_bytes", &BestFit::largest_hole_bytes,
                   "The largest value that still fits in one piece.")
      .def_prop_ro("live_extents", &live_extents,
                   "Start -> bytes taken, of everything allocated and not freed.")
      .def("rounded", &BestFit::rounded, "nbytes"_a,
           "nbytes rounded up to whole granules: what it takes of the segment.")
      .def("allocate", &allocate, "nbytes"_a, "max_pieces"_a,
           "Room as (offset, bytes) pieces in order, whose bytes add up to nbytes and of which every one but "
           "the\n"
           "last fills its granules; None when it does not fit in max_pieces. Nothing is taken for 0.")
      .def("free", &free_piece, "offset"_a, "nbytes"_a,
           "Give back one piece exactly as allocate() returned it. Raises KeyError, ValueError.");
}

void bind_eviction(nb::module_& m) {
  nb::class_<EvictionQueue>(m, "EvictionQueue",
                            "An EvictionPolicy: clock, lru, arc or gdsf. Not thread-safe.\n\n"
                            "What stood in a batch before an id that raises has been done.")
      .def(nb::new_(&make_queue), "policy"_a)
      .def("__len__", &EvictionQueue::size)
      .def("__contains__", &EvictionQueue::contains, "id"_a)
      .def("insert", &insert, "ids"_a, "keys"_a, "nbytes"_a, "Raises ValueError for an id that is there.")
      .def("touch", &for_each<&EvictionQueue::touch>, "ids"_a, "Raises KeyError for an id that is not there.")
      .def("pin", &for_each<&EvictionQueue::pin>, "ids"_a, "Raises KeyError for an id that is not there.")
      .def("unpin", &for_each<&EvictionQueue::unpin>, "ids"_a,
           "Raises KeyError for an id that is not there or not pinned.")
      .def("remove", &for_each<&EvictionQueue::remove>, "ids"_a,
           "Raises KeyError for an id that is not there.")
      .def("victim", &EvictionQueue::victim);
}

}  // namespace

void bind_space(nb::module_& m) {
  bind_best_fit(m);
  bind_eviction(m);
}

}  // namespace mooncake::store
