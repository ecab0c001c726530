#include <nanobind/nanobind.h>

#include "abi.hpp"

namespace nb = nanobind;

NB_MODULE(_core, module) {
  module.doc() =
      "Compiled core of the ascend driver. The engine calls it through the capsule, without Python.";
  module.def(
      "driver", [] { return nb::capsule(mooncake::ascend::driver_table(), MC_DRIVER_CAPSULE); },
      "The driver's C function table, as a PyCapsule.");
}
