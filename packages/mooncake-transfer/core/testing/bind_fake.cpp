#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "driver.hpp"
#include "support/gil.hpp"

namespace nb = nanobind;

namespace mooncake::fake {
namespace {

using nogil = nb::call_guard<GilReleased>;

// A fabric with the number under which endpoints find it.
struct Handle {
  Handle(uint64_t seed, bool manual_clock) : fabric(make_fabric(seed, manual_clock, &number)) {}
  uint64_t number = 0;
  std::shared_ptr<Fabric> fabric;
};

void set_field(Behaviour& behaviour, const std::string& field, double value) {
  auto count = [&] { return static_cast<uint64_t>(value); };
  if (field == "latency_s") {
    behaviour.latency_s = value;
  } else if (field == "jitter_s") {
    behaviour.jitter_s = value;
  } else if (field == "bandwidth") {
    behaviour.bandwidth = value;
  } else if (field == "loss") {
    behaviour.loss = value;
  } else if (field == "lose_next") {
    behaviour.lose_next = count();
  } else if (field == "error_rate") {
    behaviour.error_rate = value;
  } else if (field == "fail_next") {
    behaviour.fail_next = count();
  } else if (field == "error_status") {
    behaviour.error_status = static_cast<int>(value);
  } else if (field == "corrupt_rate") {
    behaviour.corrupt_rate = value;
  } else if (field == "corrupt_next") {
    behaviour.corrupt_next = count();
  } else if (field == "notice_delay_s") {
    behaviour.notice_delay_s = value;
  } else if (field == "lose_notices") {
    behaviour.lose_notices = count();
  } else if (field == "fail_notices") {
    behaviour.fail_notices = count();
  } else if (field == "doubtful_notices") {
    behaviour.doubtful_notices = count();
  } else if (field == "reorder") {
    behaviour.reorder = value != 0;
  } else if (field == "record") {
    behaviour.record = value != 0;
  } else {
    throw nb::value_error(("a fake device has no " + field).c_str());
  }
}

nb::dict counters_of(Handle& handle, const std::string& name) {
  Counters now;
  handle.fabric->with_device(name, [&](Device& device) { now = device.counters; });
  nb::dict out;
  out["operations"] = now.operations;
  out["completed"] = now.completed;
  out["errors"] = now.errors;
  out["bytes_read"] = now.bytes_read;
  out["bytes_written"] = now.bytes_written;
  out["submits"] = now.submits;
  out["doorbells"] = now.doorbells;
  out["stream_submits"] = now.stream_submits;
  out["cancels"] = now.cancels;
  out["lost"] = now.lost;
  out["corrupted"] = now.corrupted;
  out["refused"] = now.refused;
  out["notices"] = now.notices;
  out["in_flight"] = now.in_flight;
  out["in_flight_bytes"] = now.in_flight_bytes;
  out["in_flight_max"] = now.in_flight_max;
  out["in_flight_bytes_max"] = now.in_flight_bytes_max;
  return out;
}

nb::list served_by(Handle& handle, const std::string& name) {
  std::deque<Served> served;
  handle.fabric->with_device(name, [&](Device& device) { served = device.served; });
  nb::list out;
  for (const Served& one : served) {
    out.append(nb::make_tuple(one.peer, one.opcode == MC_READ ? "read" : "write", one.region_id,
                              one.local_offset, one.remote_offset, one.length, one.stream));
  }
  return out;
}

}  // namespace
}  // namespace mooncake::fake

NB_MODULE(_fake, m) {
  using namespace mooncake::fake;
  m.doc() = "Compiled core of mooncake_transfer.testing.fake; use it through that module.";
  m.def(
      "driver",
      [](const std::string& name) {
        return nb::capsule(static_cast<const void*>(driver_table(name)), MC_DRIVER_CAPSULE);
      },
      nb::arg("name"), "The C function table of a fake driver of this name, as a PyCapsule.");
  nb::class_<Handle>(m, "Fabric", "Devices and links of fake drivers, and their clock.")
      .def(nb::init<uint64_t, bool>(), nb::arg("seed"), nb::arg("manual_clock"))
      .def_ro("number", &Handle::number)
      .def(
          "close", [](Handle& handle) { handle.fabric->stop(); }, nogil())
      .def(
          "now_ns", [](Handle& handle) { return handle.fabric->now_ns(); }, nogil())
      .def(
          "advance", [](Handle& handle, uint64_t ns) { handle.fabric->advance(ns); }, nb::arg("ns"), nogil())
      .def(
          "devices", [](Handle& handle) { return handle.fabric->devices(); }, nogil())
      .def(
          "set",
          [](Handle& handle, const std::string& name, const std::string& field, double value) {
            handle.fabric->with_device(name,
                                       [&](Device& device) { set_field(device.behaviour, field, value); });
          },
          nb::arg("device"), nb::arg("field"), nb::arg("value"))
      .def(
          "set_alive",
          [](Handle& handle, const std::string& name, bool alive) { handle.fabric->set_alive(name, alive); },
          nb::arg("device"), nb::arg("alive"), nogil())
      .def(
          "set_frozen",
          [](Handle& handle, const std::string& name, bool frozen) {
            handle.fabric->set_frozen(name, frozen);
          },
          nb::arg("device"), nb::arg("frozen"), nogil())
      .def(
          "set_holding",
          [](Handle& handle, const std::string& name, bool holding) {
            handle.fabric->set_holding(name, holding);
          },
          nb::arg("device"), nb::arg("holding"), nogil())
      .def(
          "held_in", [](Handle& handle, const std::string& name) { return handle.fabric->held_in(name); },
          nb::arg("device"), nogil())
      .def(
          "set_link",
          [](Handle& handle, const std::string& one, const std::string& other, bool up) {
            handle.fabric->set_link(one, other, up);
          },
          nb::arg("one"), nb::arg("other"), nb::arg("up"), nogil())
      .def(
          "inject_notice",
          [](Handle& handle, const std::string& name, const nb::bytes& bytes) {
            handle.fabric->inject_notice(name, {bytes.c_str(), bytes.size()});
          },
          nb::arg("device"), nb::arg("data"), "Deliver it to the device as if a peer had sent it.")
      .def("counters", counters_of, nb::arg("device"),
           nb::sig("def counters(self, device: str) -> dict[str, int]"))
      .def("served", served_by, nb::arg("device"),
           nb::sig("def served(self, device: str) -> list[tuple[str, str, int, int, int, int, int]]"),
           "Peer, opcode, region id of the peer, local offset, remote offset, length, stream of each.");
}
