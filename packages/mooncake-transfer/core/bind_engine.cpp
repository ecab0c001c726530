#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind.hpp"
#include "engine.hpp"

namespace nb = nanobind;

namespace mooncake {

namespace {

using Named = std::vector<std::pair<std::string, nb::bytes>>;  // (driver name, blob)
using Blocks = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
static_assert(sizeof(Block) == 3 * sizeof(uint64_t), "a row of the array is a Block");

constexpr double kCancelGraceS = 5.0;

Named to_named(const Engine& engine, const std::vector<DriverBlob>& blobs) {
  Named named;
  for (const DriverBlob& blob : blobs)
    named.emplace_back(engine.endpoints()[blob.endpoint]->name(), to_bytes(blob.blob));
  return named;
}

// Blobs of drivers that this engine does not have are left out.
std::vector<DriverBlob> from_named(const Engine& engine, const Named& named) {
  std::vector<DriverBlob> blobs;
  for (size_t i = 0; i < engine.endpoints().size(); ++i) {
    for (const auto& [name, blob] : named) {
      if (engine.endpoints()[i]->name() != name) continue;
      blobs.push_back({i, to_string(blob)});
      break;  // a second one of the same name would take the place of the first one's handle
    }
  }
  return blobs;
}

void copy_key(const nb::bytes& key, uint8_t* out) {
  if (key.size() != MC_KEY_BYTES) {
    raise(Status::error(Code::kInvalid, "an access key has 16 bytes, got " + std::to_string(key.size())));
  }
  memcpy(out, key.c_str(), MC_KEY_BYTES);
}

void add_driver(Engine& engine, nb::capsule capsule, const std::string& name,
                const Endpoint::Options& options) {
  if (capsule.name() == nullptr || strcmp(capsule.name(), MC_DRIVER_CAPSULE) != 0) {
    raise(Status::error(Code::kUnsupported, "driver '" + name + "' handed over a capsule named '" +
                                                (capsule.name() ? capsule.name() : "") + "', expected '" +
                                                MC_DRIVER_CAPSULE + "'"));
  }
  check(engine.add_driver(static_cast<const mc_driver_v1*>(capsule.data()), name, options));
}

std::shared_ptr<Region> register_region(Engine& engine, uint64_t address, uint64_t length, int fd,
                                        uint64_t region_id, const nb::bytes& key, const std::string& name) {
  mc_memory memory{};
  memory.kind = MC_DRAM;
  memory.device = -1;
  memory.fd = fd;
  memory.address = address;
  memory.length = length;
  memory.region_id = region_id;
  copy_key(key, memory.key);
  std::shared_ptr<Region> region;
  Status status;
  {
    nb::gil_scoped_release release;
    status = engine.register_region(memory, name, &region);
  }
  check(status);
  return region;
}

std::shared_ptr<RemoteRegion> import_region(Engine& engine, std::shared_ptr<Peer> peer,
                                            const std::string& name, uint64_t region_id, const nb::bytes& key,
                                            uint64_t length, const Named& keys) {
  uint8_t raw[MC_KEY_BYTES];
  copy_key(key, raw);
  std::shared_ptr<RemoteRegion> remote;
  check(
      engine.import_region(std::move(peer), name, region_id, raw, length, from_named(engine, keys), &remote));
  return remote;
}

std::shared_ptr<Transfer> submit(Engine& engine, bool write, std::shared_ptr<Region> local,
                                 std::shared_ptr<RemoteRegion> remote, const Blocks& blocks) {
  std::shared_ptr<Transfer> transfer;
  Status status;
  const Block* rows = reinterpret_cast<const Block*>(blocks.data());
  size_t count = blocks.shape(0);
  {
    nb::gil_scoped_release release;
    status = engine.submit(write ? MC_WRITE : MC_READ, std::move(local), std::move(remote), rows, count,
                           &transfer);
  }
  check(status);
  return transfer;
}

// True when done. When the time is up the transfer is cancelled, so that the memory is the caller's again.
bool wait(Engine& engine, Transfer& transfer, double timeout_s) {
  bool done = wait_interruptibly(timeout_s, [&](uint64_t deadline) {
    engine.spin(transfer);
    return transfer.wait_until(deadline);
  });
  if (done) return true;
  return wait_interruptibly(
             kCancelGraceS,
             [&](uint64_t deadline) {
               engine.cancel(
                   transfer);  // again each time: an operation may just have moved to another driver
               return transfer.wait_until(deadline);
             }) &&
         transfer.result().ok();
}

nb::dict bytes_by_driver(const Engine& engine, const Transfer& transfer) {
  nb::dict result;
  for (size_t i = 0; i < engine.endpoints().size(); ++i) {
    if (uint64_t bytes = transfer.bytes_by_endpoint[i]) result[engine.endpoints()[i]->name().c_str()] = bytes;
  }
  return result;
}

nb::dict stats(const Engine& engine) {
  nb::dict result;
  for (const auto& endpoint : engine.endpoints()) {
    mc_stats stats{};
    check(endpoint->stats(&stats));
    nb::dict row;
    row["connections"] = stats.connections;
    row["ops"] = stats.ops;
    row["bytes_read"] = stats.bytes_read;
    row["bytes_written"] = stats.bytes_written;
    row["errors"] = stats.errors;
    row["refused"] = stats.refused;
    result[endpoint->name().c_str()] = row;
  }
  return result;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Region>(m, "Region", "Registered local memory.");
  nb::class_<Peer>(m, "Peer", "Another engine, as the drivers reach it.");
  nb::class_<RemoteRegion>(m, "RemoteRegion", "A peer's region and the rails that lead there.");
  nb::class_<Transfer>(m, "Transfer", "A batch of operations in flight.")
      .def("done", &Transfer::done)
      .def(
          "check", [](const Transfer& t) { check(t.result()); },
          "Raise what made the transfer fail, if anything did.")
      .def(
          "signal_when_done", [](Transfer& t, int fd) { check(t.signal_when_done(fd)); }, nb::arg("event_fd"))
      .def_prop_ro("total_bytes", [](const Transfer& t) { return t.total_bytes; })
      .def_prop_ro("bytes_done", [](const Transfer& t) { return t.bytes_done.load(); })
      .def_prop_ro("seconds", &Transfer::seconds);
  nb::class_<Engine>(m, "Engine", "Drivers, regions and transfers; one progress thread of its own.")
      .def(nb::init<>())
      .def(
          "add_driver", &add_driver, nb::arg("capsule"), nb::arg("name"), nb::arg("options"),
          nb::sig("def add_driver(self, capsule: object, name: str, options: list[tuple[str, str]]) -> None"))
      .def("start", [](Engine& e) { check(e.start()); })
      .def("close", &Engine::close, nb::call_guard<nb::gil_scoped_release>())
      .def("addresses",
           [](Engine& e) {
             std::vector<DriverBlob> blobs;
             check(e.export_addresses(&blobs));
             return to_named(e, blobs);
           })
      .def("register_region", &register_region, nb::arg("address"), nb::arg("length"), nb::arg("fd"),
           nb::arg("region_id"), nb::arg("key"), nb::arg("name"))
      .def(
          "export_keys",
          [](Engine& e, const Region& region) {
            std::vector<DriverBlob> blobs;
            check(e.export_keys(region, &blobs));
            return to_named(e, blobs);
          },
          nb::arg("region"))
      .def(
          "close_region",
          [](Engine& e, Region& region, double timeout_s) {
            Status status;
            {
              nb::gil_scoped_release release;
              status = e.close_region(region, deadline_after(timeout_s));
            }
            check(status);
          },
          nb::arg("region"), nb::arg("timeout_s"))
      .def(
          "add_peer",
          [](Engine& e, const std::string& label, const Named& addresses) {
            std::shared_ptr<Peer> peer;
            check(e.add_peer(label, from_named(e, addresses), &peer));
            return peer;
          },
          nb::arg("label"), nb::arg("addresses"))
      .def("import_region", &import_region, nb::arg("peer"), nb::arg("name"), nb::arg("region_id"),
           nb::arg("key"), nb::arg("length"), nb::arg("keys"))
      .def("submit", &submit, nb::arg("write"), nb::arg("local"), nb::arg("remote"), nb::arg("blocks"))
      .def("wait", &wait, nb::arg("transfer"), nb::arg("timeout_s"))
      .def("cancel", &Engine::cancel, nb::arg("transfer"), nb::call_guard<nb::gil_scoped_release>())
      .def("bytes_by_driver", &bytes_by_driver, nb::arg("transfer"),
           nb::sig("def bytes_by_driver(self, transfer: Transfer) -> dict[str, int]"))
      .def("stats", &stats, nb::sig("def stats(self) -> dict[str, dict[str, int]]"));
}

}  // namespace mooncake
