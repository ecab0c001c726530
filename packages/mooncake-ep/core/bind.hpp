// What each file of the binding adds to the module.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace mooncake::ep {

// Memory of a tensor, as Tensor.data_ptr() gives it.
template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void bind_eplb(nanobind::module_& m);
void bind_rows(nanobind::module_& m);
void bind_window(nanobind::module_& m);

}  // namespace mooncake::ep
