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
  nb::class_<Window>(
      m, "Window",
      "Memory of one rank that all ranks of a host see. Its owner alone writes it; but others may end\n"
      "words, which then keep their value.")
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
      .def("post", &Window::post, "word"_a, "value"_a,
           "The same; False, and nothing changes, when it has ended.")
      .def("end", &Window::end, "word"_a, "least"_a,
           "End a peer's word that is less than `least`; False when it has reached that.")
      .def("ended", &Window::ended, "word"_a, "Whether another rank has ended the word.")
      .def(
          "wait", &wait, "word"_a, "least"_a, "deadline_ns"_a, "pidfd"_a,
          "Wait until a word is `least` or more: 0; else 1 when the deadline passed (ns of time.monotonic),\n"
          "2 when the process of `pidfd` has died, 3 when the word has ended.");
  m.def("has_died", &has_died, "pidfd"_a, "Whether the process of a pidfd has ended.");
}

}  // namespace mooncake::ep
