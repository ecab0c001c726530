#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <system_error>

#include "bind.hpp"
#include "support/gil.hpp"
#include "window/window.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::ep {

namespace {

using Bytes = nb::ndarray<uint8_t, nb::shape<-1>, nb::device::cpu>;

// An OSError of Python, with the number that the kernel gave.
template <typename Make>
Window* made(Make&& make) {
  try {
    return new Window(make());
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

Bytes memory(nb::handle_t<Window> self, size_t offset, size_t bytes) {
  auto& window = nb::cast<Window&>(self);
  if (offset > window.bytes() || bytes > window.bytes() - offset) throw nb::value_error("beyond the window");
  return Bytes(window.data() + offset, {bytes}, self);
}

int wait(Window& window, size_t word, uint64_t least, int64_t deadline_ns, int pidfd) {
  GilReleased released;
  return static_cast<int>(window.wait(word, least, deadline_ns, pidfd));
}

}  // namespace

void bind_window(nb::module_& m) {
  nb::class_<Window>(m, "Window",
                     "Memory of one rank that all ranks of a host see; only its owner writes it.")
      .def_static(
          "create", [](size_t bytes) { return made([&] { return Window::create(bytes); }); }, "bytes"_a,
          "A new one; its pages take memory once they are written. Raises OSError.")
      .def_static(
          "open",
          [](const std::string& path, size_t bytes) {
            return made([&] { return Window::open(path, bytes); });
          },
          "path"_a, "bytes"_a, "A peer's, by a path to its file. Raises OSError.")
      .def_prop_ro("fd", &Window::fd, "Descriptor of the file that it maps.")
      .def_prop_ro(
          "address", [](const Window& window) { return reinterpret_cast<uintptr_t>(window.data()); },
          "Where it begins in this process.")
      .def("memory", &memory, "offset"_a, "bytes"_a,
           "A part of it, by DLPack; keeps the window. Raises ValueError.")
      .def("load", &Window::load, "word"_a, "A word, with all that its writer wrote before.")
      .def("store", &Window::store, "word"_a, "value"_a, "Set a word of ours and wake who waits for it.")
      .def("wait", &wait, "word"_a, "least"_a, "deadline_ns"_a, "pidfd"_a,
           "Wait until a word is `least` or more: 0; 1 when the deadline passed (ns of time.monotonic); 2 "
           "when\n"
           "the process of `pidfd` has ended before.");
}

}  // namespace mooncake::ep
