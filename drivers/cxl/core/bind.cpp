#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "abi.hpp"
#include "options.hpp"
#include "pool.hpp"
#include "support/gil.hpp"

namespace nb = nanobind;
using namespace mooncake::cxl;

namespace {

// Pool and block as Python holds them. A block keeps the pool mapped.
struct PyBlock {
  std::shared_ptr<Pool> pool;
  Pool::BlockView view;
  ~PyBlock() {
    if (pool) pool->release(view.index);
  }
  std::byte* at(uint64_t offset, uint64_t length) const {
    if (offset > view.length || length > view.length - offset)
      throw nb::value_error("the range is outside the block");
    return pool->data() + view.offset + offset;
  }
};

struct PyPool {
  std::shared_ptr<Pool> pool;
};

void require(const Status& status) {
  if (status.ok()) return;
  PyObject* kind = status.code == MC_INVALID     ? PyExc_ValueError
                   : status.code == MC_NO_MEMORY ? PyExc_MemoryError
                   : status.code == MC_TIMEOUT   ? PyExc_TimeoutError
                                                 : PyExc_OSError;
  PyErr_SetString(kind, status.reason.c_str());
  throw nb::python_error();
}

// What may wait for a lock or touch much memory runs without the interpreter's lock.
template <class Body>
void without_gil(Body&& body) {
  Status status;
  {
    mooncake::GilReleased released;
    status = body();
  }
  require(status);
}

Options parse(const std::vector<std::pair<std::string, std::string>>& options) {
  std::vector<mc_option> given;
  for (const auto& [name, value] : options) given.push_back({name.c_str(), value.c_str()});
  Options parsed;
  require(parse_options(given.data(), given.size(), parsed));
  return parsed;
}

// Python's, from here on.
PyBlock* held(const std::shared_ptr<Pool>& pool, Pool::BlockView view) {
  return new PyBlock{pool, std::move(view)};
}

void bind_block(nb::module_& module) {
  nb::class_<PyBlock>(module, "Block", "A piece of the pool; given back when nothing refers to it any more.")
      .def_prop_ro("address",
                   [](const PyBlock& block) { return reinterpret_cast<uintptr_t>(block.at(0, 0)); })
      .def_prop_ro("nbytes", [](const PyBlock& block) { return block.view.length; })
      .def_prop_ro("offset", [](const PyBlock& block) { return block.view.offset; })
      .def_prop_ro("name", [](const PyBlock& block) { return block.view.name; })
      .def(
          "flush",
          [](const PyBlock& block, uint64_t offset, uint64_t length) {
            std::byte* at = block.at(offset, length);
            mooncake::GilReleased released;
            write_back(at, length);
          },
          nb::arg("offset"), nb::arg("length"), "Write the range from the caches to memory.")
      .def(
          "refresh",
          [](const PyBlock& block, uint64_t offset, uint64_t length) {
            std::byte* at = block.at(offset, length);
            mooncake::GilReleased released;
            drop_lines(at, length);
          },
          nb::arg("offset"), nb::arg("length"), "Drop the range from the caches.");
}

void bind_pool(nb::module_& module) {
  nb::class_<PyPool>(module, "Pool", "A mapped pool, and this process as a member of it.")
      .def_prop_ro(
          "uuid",
          [](const PyPool& self) { return nb::bytes(reinterpret_cast<const char*>(self.pool->uuid()), 16); })
      .def_prop_ro("nbytes", [](const PyPool& self) { return self.pool->size(); })
      .def_prop_ro("host", [](const PyPool& self) { return self.pool->host(); })
      .def_prop_ro("hosts", [](const PyPool& self) { return self.pool->hosts(); })
      .def(
          "allocate",
          [](const PyPool& self, uint64_t length, const std::string& name, bool keep) {
            Pool::BlockView view{};
            without_gil([&] { return self.pool->allocate(length, name, keep, &view); });
            return held(self.pool, std::move(view));
          },
          nb::arg("nbytes"), nb::arg("name"), nb::arg("keep"), "Take zeroed bytes of this host's share.")
      .def(
          "adopt",
          [](const PyPool& self, const std::string& name) {
            Pool::BlockView view{};
            without_gil([&] { return self.pool->adopt(name, &view); });
            return held(self.pool, std::move(view));
          },
          nb::arg("name"), "Take over a kept block that nobody owns now.")
      .def(
          "drop",
          [](const PyPool& self, const std::string& name) {
            without_gil([&] { return self.pool->drop(name); });
          },
          nb::arg("name"), "Remove a kept block that nobody owns.")
      .def(
          "blocks",
          [](const PyPool& self) {
            std::vector<Pool::BlockView> found;
            without_gil([&] { return self.pool->list(&found); });
            std::vector<std::tuple<std::string, uint64_t, bool, bool>> rows;
            for (const Pool::BlockView& view : found)
              rows.emplace_back(view.name, view.length, view.kept, view.owned);
            return rows;
          },
          "Name, bytes, whether it is kept, whether it has an owner, of every block of this host.")
      .def(
          "free_bytes",
          [](const PyPool& self) {
            uint64_t bytes = 0;
            without_gil([&] { return self.pool->free_bytes(&bytes); });
            return bytes;
          },
          "What is left of this host's share, all pieces together.");
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() = "Compiled core of the cxl driver. The engine calls it through the capsule, without Python.";
  module.def(
      "driver", [] { return nb::capsule(driver_table(), MC_DRIVER_CAPSULE); },
      "The driver's C function table, as a PyCapsule.");

  bind_block(module);
  bind_pool(module);
  module.def(
      "open_pool",
      [](const std::vector<std::pair<std::string, std::string>>& options) {
        Options parsed = parse(options);
        auto made = std::make_unique<PyPool>();
        without_gil([&] { return Pool::open(parsed.pool, made->pool); });
        return made.release();  // Python's, from here on
      },
      nb::arg("options"), "Map and join the pool that the options of an endpoint name.");
  module.def(
      "format_pool",
      [](const std::vector<std::pair<std::string, std::string>>& options, bool overwrite) {
        Options parsed = parse(options);
        without_gil([&] { return Pool::format(parsed.pool, overwrite); });
      },
      nb::arg("options"), nb::arg("overwrite"), "Write an empty pool over what is there.");
}
