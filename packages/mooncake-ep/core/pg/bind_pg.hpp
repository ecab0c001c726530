// What the binding of the process group adds to the module.
#pragma once

#include <nanobind/nanobind.h>

namespace mooncake::ep::pg {

void bind_pg(nanobind::module_& m);

}  // namespace mooncake::ep::pg
