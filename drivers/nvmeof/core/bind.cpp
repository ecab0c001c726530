#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <utility>

#include "abi.hpp"
#include "identity.hpp"
#include "nvme_controller.hpp"
#include "support/gil.hpp"

namespace nb = nanobind;
using namespace mooncake::nvmeof;

namespace {

nb::tuple identify(const std::string& url, const std::string& host_nqn, bool header_digest, bool data_digest,
                   double timeout_s) {
  nvme::Url place;
  nvme::Identity found;
  Status status = nvme::parse_url(url, place);
  if (status.ok()) {
    nvme::Settings settings;
    settings.host_nqn = host_nqn;
    settings.header_digest = header_digest;
    settings.data_digest = data_digest;
    settings.connect_timeout_s = timeout_s;
    settings.keep_alive_s = 0;
    mooncake::GilReleased released;
    status = nvme::Controller::identify(place, settings, found);
  }
  nb::dict facts;
  facts["blocks"] = found.blocks;
  facts["block_bytes"] = found.block_bytes;
  facts["most_bytes"] = found.most_bytes;
  facts["nguid"] = nb::bytes(reinterpret_cast<const char*>(found.nguid), sizeof found.nguid);
  facts["uuid"] = nb::bytes(reinterpret_cast<const char*>(found.uuid), sizeof found.uuid);
  facts["model"] = found.model;
  facts["serial"] = found.serial;
  return nb::make_tuple(static_cast<int>(status.code), status.reason, facts);
}

nb::tuple find(const std::string& folder, const std::string& identity) {
  std::string name;
  Status status = find_namespace(folder, Identity::parse(identity), name);
  return nb::make_tuple(static_cast<int>(status.code), status.reason, name);
}

}  // namespace

NB_MODULE(_core, module) {
  module.doc() =
      "Compiled core of the nvmeof driver. The engine calls it through the capsule, without Python.";
  module.def(
      "driver", [] { return nb::capsule(driver_table(), MC_DRIVER_CAPSULE); },
      "The driver's C function table, as a PyCapsule.");
  module.def(
      "identify", &identify, nb::arg("url"), nb::arg("host_nqn"), nb::arg("header_digest"),
      nb::arg("data_digest"), nb::arg("timeout_s"),
      nb::sig(
          "def identify(url: str, host_nqn: str, header_digest: bool, data_digest: bool, timeout_s: float)"
          " -> tuple[int, str, dict[str, object]]"),
      "Ask the target of a URL for its namespace: the mc_status, the reason, and what it is.");
  module.def(
      "find_namespace", &find, nb::arg("folder"), nb::arg("identity"),
      nb::sig("def find_namespace(folder: str, identity: str) -> tuple[int, str, str]"),
      "Look below a folder like /sys/block for a peer's namespace: the mc_status, the reason, its name.");
}
