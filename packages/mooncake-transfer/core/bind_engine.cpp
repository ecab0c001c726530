#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>

#include "bind.hpp"
#include "channel.hpp"
#include "engine.hpp"

namespace nb = nanobind;

namespace mooncake {

namespace {

using Named = std::vector<std::tuple<std::string, std::string, nb::bytes>>;  // driver, device, blob

constexpr double kNanoseconds = 1e9;

Named to_named(const std::vector<DriverBlob>& blobs) {
  Named named;
  for (const DriverBlob& blob : blobs) named.emplace_back(blob.driver, blob.device, to_bytes(blob.blob));
  return named;
}

std::vector<DriverBlob> from_named(const Named& named) {
  std::vector<DriverBlob> blobs;
  for (const auto& [driver, device, blob] : named) blobs.push_back({driver, device, to_string(blob)});
  return blobs;
}

void copy_key(const nb::bytes& key, uint8_t* out) {
  if (key.size() != MC_KEY_BYTES) {
    raise(Status::error(Code::kInvalid, "an access key has 16 bytes, got " + std::to_string(key.size())));
  }
  memcpy(out, key.c_str(), MC_KEY_BYTES);
}

void add_endpoint(Engine& engine, nb::capsule capsule, const std::string& name, const std::string& device,
                  int numa_node, const Endpoint::Options& options) {
  if (capsule.name() == nullptr || strcmp(capsule.name(), MC_DRIVER_CAPSULE) != 0) {
    raise(Status::error(Code::kUnsupported, "driver '" + name + "' handed over a capsule named '" +
                                                (capsule.name() ? capsule.name() : "") + "', expected '" +
                                                MC_DRIVER_CAPSULE + "'"));
  }
  check(engine.add_endpoint(static_cast<const mc_driver_v1*>(capsule.data()), name, device, numa_node,
                            options));
}

void set_policy(Engine& engine, uint32_t breaker_errors, double breaker_window_s, double breaker_pause_s,
                double breaker_max_pause_s, double suspect_pause_s, double slow_ratio, uint32_t probe_every,
                uint64_t slice_bytes, uint32_t attempts, double aging_s) {
  auto ns = [](double seconds) { return static_cast<uint64_t>(seconds * kNanoseconds); };
  RailPolicy policy;
  policy.breaker_errors = breaker_errors;
  policy.breaker_window_ns = ns(breaker_window_s);
  policy.breaker_pause_ns = ns(breaker_pause_s);
  policy.breaker_max_pause_ns = ns(breaker_max_pause_s);
  policy.suspect_pause_ns = ns(suspect_pause_s);
  policy.slow_ratio = slow_ratio;
  policy.probe_every = probe_every;
  policy.slice_bytes = slice_bytes;
  policy.attempts = attempts;
  policy.aging_ns = ns(aging_s);
  engine.set_policy(policy);
}

std::shared_ptr<Region> register_region(Engine& engine, uint32_t kind, int device, uint64_t address,
                                        uint64_t length, int fd, uint64_t fd_offset, int numa_node,
                                        uint64_t region_id, const nb::bytes& key, const std::string& name,
                                        const std::string& location) {
  mc_memory memory{};
  memory.kind = kind;
  memory.device = device;
  memory.fd = fd;
  memory.fd_offset = fd_offset;
  memory.address = address;
  memory.length = length;
  memory.numa_node = numa_node;
  memory.region_id = region_id;
  if (!location.empty()) memory.location = location.c_str();
  copy_key(key, memory.key);
  std::shared_ptr<Region> region;
  Status status;
  {
    GilReleased release;
    status = engine.register_region(memory, name, &region);
  }
  check(status);
  return region;
}

Named grant(Engine& engine, const Region& region, const nb::bytes& key, uint32_t access) {
  uint8_t raw[MC_KEY_BYTES];
  copy_key(key, raw);
  std::vector<DriverBlob> blobs;
  Status status;
  {
    GilReleased release;  // a driver written in Python needs it
    status = engine.grant(region, raw, access, &blobs);
  }
  check(status);
  return to_named(blobs);
}

void revoke(Engine& engine, const Region& region, const nb::bytes& key, double timeout_s) {
  require_origin(engine.origin());
  uint8_t raw[MC_KEY_BYTES];
  copy_key(key, raw);
  Status status;
  {
    Interruptible released;
    status = engine.revoke(region, raw, deadline_after(timeout_s));
  }
  throw_if_interrupted();
  check(status);
}

void close_region(Engine& engine, Region& region, double timeout_s, bool refuse_when_used) {
  Status status;
  {
    Interruptible released;
    status = engine.close_region(region, deadline_after(timeout_s), refuse_when_used);
  }
  throw_if_interrupted();
  check(status);
}

std::shared_ptr<Peer> add_peer(Engine& engine, const std::string& label, uint64_t connection, uint64_t epoch,
                               const Named& addresses) {
  std::vector<DriverBlob> blobs = from_named(addresses);
  std::shared_ptr<Peer> peer;
  Status status;
  {
    Interruptible released;
    status = engine.add_peer(label, connection, epoch, blobs, &peer);
  }
  throw_if_interrupted();
  check(status);
  return peer;
}

std::shared_ptr<RemoteRegion> import_region(Engine& engine, std::shared_ptr<Peer> peer,
                                            const std::string& name, uint64_t region_id, const nb::bytes& key,
                                            uint64_t length, const Named& keys) {
  uint8_t raw[MC_KEY_BYTES];
  copy_key(key, raw);
  std::vector<DriverBlob> blobs = from_named(keys);
  std::shared_ptr<RemoteRegion> remote;
  Status status;
  {
    Interruptible released;
    status = engine.import_region(std::move(peer), name, region_id, raw, length, blobs, &remote);
  }
  throw_if_interrupted();
  check(status);
  return remote;
}

using Order = std::tuple<uint64_t, uint64_t, std::string, std::string, nb::bytes>;

std::vector<Order> fence_orders(Engine& engine, uint64_t epoch) {
  std::vector<LateWrites::Order> orders;
  {
    GilReleased release;
    if (auto late = engine.late_writes_of(epoch)) orders = late->orders();
  }
  std::vector<Order> named;
  for (const auto& order : orders)
    named.emplace_back(order.way, order.failures, order.driver, order.device, to_bytes(order.token));
  return named;
}

void fenced(Engine& engine, uint64_t epoch, const std::vector<Order>& orders) {
  std::vector<LateWrites::Order> done;
  for (const auto& [way, failures, driver, device, token] : orders)
    done.push_back({way, failures, driver, device, to_string(token)});
  GilReleased release;
  if (auto late = engine.late_writes_of(epoch)) late->fenced(done);
}

void fence_answered(Engine& engine, uint64_t epoch, const std::string& failure) {
  GilReleased release;
  auto late = engine.late_writes_of(epoch);
  if (late) late->answered(failure.empty() ? Status{} : Status::error(Code::kUnreachable, failure));
}

void fence(Engine& engine, const std::string& driver, const std::string& device, const nb::bytes& token,
           double timeout_s) {
  std::string bytes = to_string(token);
  Status status;
  {
    Interruptible released;
    status = engine.fence(driver, device, bytes, deadline_after(timeout_s));
  }
  throw_if_interrupted();
  check(status);
}

void enable_driver(Engine& engine, const std::string& name, bool enabled) {
  require_origin(engine.origin());
  Status status;
  {
    GilReleased release;
    status = engine.enable_driver(name, enabled);
  }
  check(status);
}

nb::dict rail_row(const Engine& engine, const Peer& peer, const Rail& rail, uint64_t now) {
  nb::dict row;
  row["peer"] = peer.label();
  row["driver"] = engine.endpoints()[rail.endpoint]->name();
  row["device"] = engine.endpoints()[rail.endpoint]->device();
  row["remote_device"] = rail.remote_device;
  bool paused = rail.paused_until_ns() > now;
  row["state"] = paused ? (rail.open() ? "open" : "suspect") : (rail.open() ? "half-open" : "closed");
  row["bytes"] = rail.bytes.load();
  row["ops"] = rail.ops.load();
  row["errors"] = rail.errors.load();
  row["retries"] = rail.retries.load();
  row["bandwidth_bytes_per_s"] = rail.bandwidth();
  row["in_flight_bytes"] = rail.in_flight_bytes();
  nb::list buckets;
  for (const auto& bucket : rail.latency) buckets.append(bucket.load());
  row["latency_buckets"] = buckets;
  row["last_error"] = rail.last_error();
  return row;
}

nb::list rails(Engine& engine) {
  nb::list rows;
  uint64_t now = now_ns();
  for (const auto& peer : engine.peers()) {
    for (const auto& rail : peer->rails()) rows.append(rail_row(engine, *peer, *rail, now));
  }
  return rows;
}

const char* kind_of(Notice::Kind kind) {
  switch (kind) {
    case Notice::Kind::kRailFailed:
      return "rail failed";
    case Notice::Kind::kRailUnused:
      return "rail unused";
    case Notice::Kind::kBreakerOpened:
      return "breaker opened";
    case Notice::Kind::kRailRecovered:
      return "rail recovered";
    case Notice::Kind::kDriverFault:
      return "driver fault";
    case Notice::Kind::kFence:
      return "fence";
    default:
      return "held";
  }
}

nb::object next_notice(Engine& engine, double timeout_s) {
  Notice notice;
  bool found;
  {
    GilReleased release;
    found = engine.notices().pop(deadline_after(timeout_s), &notice);
  }
  if (!found) return nb::none();
  return nb::make_tuple(kind_of(notice.kind), notice.peer, notice.rail, notice.region, notice.text,
                        notice.token);
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
    row["faults"] = endpoint->faults.load();
    row["notices_sent"] = endpoint->notices_sent.load();
    row["notices_received"] = endpoint->notices_received.load();
    row["notices_dropped"] = endpoint->notices_dropped.load();
    result[endpoint->label().c_str()] = row;
  }
  return result;
}

}  // namespace

void bind_engine(nb::module_& m) {
  nb::class_<Region>(m, "Region", "Registered local memory.")
      .def("enter", &Region::enter, "Keeps it from being closed; false when it is closing.")
      .def("leave", &Region::leave);
  nb::class_<Peer>(m, "Peer", "Another engine, as the drivers reach it.");
  nb::class_<RemoteRegion>(m, "RemoteRegion", "A peer's region and the rails that lead there.");
  nb::class_<Engine>(m, "Engine", "Drivers, regions and transfers; one progress thread of its own.")
      .def(
          "__init__",
          [](Engine* self, Channel& channel) {
            new (self) Engine();
            self->set_channel(&channel);
          },
          nb::arg("channel"), nb::keep_alive<1, 2>())
      .def("add_endpoint", &add_endpoint, nb::arg("capsule"), nb::arg("driver"), nb::arg("device"),
           nb::arg("numa_node"), nb::arg("options"),
           nb::sig(
               "def add_endpoint(self, capsule: object, driver: str, device: str, numa_node: int, options: "
               "list[tuple[str, str]]) -> None"))
      .def("set_policy", &set_policy, nb::arg("breaker_errors"), nb::arg("breaker_window_s"),
           nb::arg("breaker_pause_s"), nb::arg("breaker_max_pause_s"), nb::arg("suspect_pause_s"),
           nb::arg("slow_ratio"), nb::arg("probe_every"), nb::arg("slice_bytes"), nb::arg("attempts"),
           nb::arg("aging_s"))
      .def("set_numa_distances", &Engine::set_numa_distances, nb::arg("distances"))
      .def("start", [](Engine& e) { check(e.start()); })
      .def("close", &Engine::close, nb::call_guard<GilReleased>())
      .def("addresses",
           [](Engine& e) {
             std::vector<DriverBlob> blobs;
             check(e.export_addresses(&blobs));
             return to_named(blobs);
           })
      .def("register_region", &register_region, nb::arg("kind"), nb::arg("device"), nb::arg("address"),
           nb::arg("length"), nb::arg("fd"), nb::arg("fd_offset"), nb::arg("numa_node"), nb::arg("region_id"),
           nb::arg("key"), nb::arg("name"), nb::arg("location") = "")
      .def(
          "export_keys",
          [](Engine& e, const Region& region) {
            std::vector<DriverBlob> blobs;
            check(e.export_keys(region, &blobs));
            return to_named(blobs);
          },
          nb::arg("region"))
      .def("grant", &grant, nb::arg("region"), nb::arg("key"), nb::arg("access"))
      .def("revoke", &revoke, nb::arg("region"), nb::arg("key"), nb::arg("timeout_s"))
      .def("close_region", &close_region, nb::arg("region"), nb::arg("timeout_s"),
           nb::arg("refuse_when_used"))
      .def("add_peer", &add_peer, nb::arg("label"), nb::arg("connection"), nb::arg("epoch"),
           nb::arg("addresses"))
      .def("import_region", &import_region, nb::arg("peer"), nb::arg("name"), nb::arg("region_id"),
           nb::arg("key"), nb::arg("length"), nb::arg("keys"))
      .def("next_notice", &next_notice, nb::arg("timeout_s"),
           nb::sig("def next_notice(self, timeout_s: float) -> tuple[str, str, str, str, str, int] | None"),
           "Kind, peer, rail, region, text and a token: of the held run, or the epoch of the peer.")
      .def("fence_orders", &fence_orders, nb::arg("epoch"),
           "What that peer is to fence now: way, failures, driver, device, token.")
      .def("fenced", &fenced, nb::arg("epoch"), nb::arg("orders"))
      .def("fence_answered", &fence_answered, nb::arg("epoch"), nb::arg("failure"),
           "Ends what a notice `fence` asked for; without a failure it has been done.")
      .def("fence", &fence, nb::arg("driver"), nb::arg("device"), nb::arg("token"), nb::arg("timeout_s"),
           "For a peer: ends what the token names.")
      .def("enable_driver", &enable_driver, nb::arg("name"), nb::arg("enabled"))
      .def("rails", &rails, nb::sig("def rails(self) -> list[dict[str, object]]"))
      .def("stats", &stats, nb::sig("def stats(self) -> dict[str, dict[str, int]]"));
}

}  // namespace mooncake
