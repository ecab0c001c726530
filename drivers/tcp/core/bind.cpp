// The Python module: one function, which hands the C function table to the engine.
#include <nanobind/nanobind.h>

#include "driver.hpp"

namespace nb = nanobind;

NB_MODULE(_core, m) {
  m.doc() = "Compiled core of mooncake_driver_tcp.";
  m.def(
      "driver", [] { return nb::capsule(mooncake_tcp::driver_table(), MC_DRIVER_CAPSULE); },
      nb::sig("def driver() -> typing_extensions.CapsuleType"),
      "The function table of abi/mooncake_driver.h, in a capsule named \"mooncake.driver.v1\".");
}
