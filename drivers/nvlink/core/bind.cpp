#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "abi.hpp"
#include "allocator.hpp"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  module.doc() =
      "Compiled core of the nvlink driver. The engine calls it through the capsule, without Python.";
  module.def(
      "driver", [] { return nb::capsule(mooncake::nvlink::driver_table(), MC_DRIVER_CAPSULE); },
      "The driver's C function table, as a PyCapsule.");
  module.def(
      "prepare_allocator",
      [](const std::string& library) { return mooncake::nvlink::prepare_allocator(library).reason; },
      nb::arg("library"),
      "Loads the CUDA driver library for the allocator; returns why it cannot, or nothing.");
  module.def("allocation_failure", &mooncake::nvlink::allocation_failure,
             "Why the last allocation failed; empty: none did.");
}
