// The desk, its lock and grants for the master's Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <memory>

#include "bind.hpp"
#include "bind_map.hpp"
#include "desk.hpp"
#include "mooncake_handler.h"
#include "support/gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace {

constexpr const char* kNames[kExpressKinds] = {"", "Locate", "Release", "Exist", "Reserve", "Commit"};

nb::bytes bytes_of(const void* data, size_t nbytes) {
  return nb::bytes(static_cast<const char*>(data), nbytes);
}

// ---- grants

std::vector<uint32_t> slots_of(const nb::bytes& slots) {
  if (slots.size() % sizeof(uint32_t) != 0) throw nb::value_error("slots must be 32-bit integers");
  std::vector<uint32_t> found(slots.size() / sizeof(uint32_t));
  if (!found.empty()) memcpy(found.data(), slots.c_str(), slots.size());
  return found;
}

Grant grant(GrantTable& self, uint64_t client, const nb::bytes& slots, double now_s, const nb::list& keys) {
  std::vector<std::string> texts;
  texts.reserve(keys.size());
  for (nb::handle key : keys) {
    auto bytes = nb::borrow<nb::bytes>(key);
    texts.emplace_back(bytes.c_str(), bytes.size());
  }
  return self.grant(client, slots_of(slots), now_s, std::move(texts));
}

nb::list keys_of(const Grant& self) {
  nb::list keys;
  for (const std::string& key : self.keys) keys.append(bytes_of(key.data(), key.size()));
  return keys;
}

void bind_grants(nb::module_& m) {
  nb::class_<Grant>(m, "Grant", "What a client was promised about some objects, in the order it named them.")
      .def_ro("id", &Grant::id)
      .def_ro("client", &Grant::client)
      .def_ro("deadline_s", &Grant::deadline_s)
      .def_prop_ro(
          "slots",
          [](const Grant& self) { return bytes_of(self.slots.data(), self.slots.size() * sizeof(uint32_t)); },
          "Of the objects in the map, uint32 each.")
      .def_prop_ro("keys", &keys_of, nb::sig("def keys(self) -> list[bytes]"),
                   "Of a reservation: the texts of the keys.");
  nb::class_<GrantTable>(
      m, "GrantTable",
      "Grants of one kind, which all live equally long unless renewed. Not thread-safe; times are the\n"
      "caller's.")
      .def(nb::init<double>(), "ttl_s"_a)
      .def("__len__", &GrantTable::size)
      .def("grant", &grant, "client"_a, "slots"_a, "now_s"_a, "keys"_a = nb::list(),
           nb::sig(
               "def grant(self, client: int, slots: bytes, now_s: float, keys: list[bytes] = ...) -> Grant"),
           "Promise something anew. Ids are never used again.")
      .def("renew", &GrantTable::renew, "id"_a, "client"_a, "now_s"_a,
           "Let a grant of the client live for another full time; False when it has none of this id.")
      .def("__contains__", &GrantTable::has, "id"_a)
      .def(
          "slots_of",
          [](const GrantTable& self, uint64_t id, uint64_t client) {
            const Grant* found = self.find(id, client);
            return found ? bytes_of(found->slots.data(), found->slots.size() * sizeof(uint32_t))
                         : nb::bytes("", 0);
          },
          "id"_a, "client"_a, "The slots of a grant of the client; none when it has none of this id.")
      .def(
          "take", [](GrantTable& self, uint64_t id, uint64_t client) { return self.take(id, client); },
          "id"_a, "client"_a, "End a grant of the client and return it; None when it has none of this id.")
      .def("take_all", &GrantTable::take_all, "client"_a, "End every grant of a client.")
      .def("take_expired", &GrantTable::take_expired, "now_s"_a, "End the grants whose deadline has passed.")
      .def_prop_ro("newest", &GrantTable::newest, "Id of the last grant; later ones have higher ids.")
      .def("all", &GrantTable::all, "Every grant that has not ended.")
      .def(
          "slots_until",
          [](const GrantTable& self, uint64_t newest) {
            std::vector<nb::bytes> found;
            for (const auto& slots : self.slots_until(newest)) {
              found.push_back(bytes_of(slots.data(), slots.size() * sizeof(uint32_t)));
            }
            return found;
          },
          "newest"_a,
          "The slots of each grant that was given no later than that of this id, and has not ended.")
      .def_prop_ro("first_deadline_s", &GrantTable::first_deadline_s,
                   "When the next grant expires; None when there is none.");
}

// ---- the lock

// Who waits for it must not keep the interpreter from who has it.
void acquire(DeskLock& lock) {
  if (lock.try_acquire(0)) return;
  mooncake::GilReleased release;
  lock.acquire();
}

void require_mine(const DeskLock& lock) {
  if (!lock.is_mine()) throw std::runtime_error("this thread does not hold the lock");
}

void unlock(DeskLock& lock) {
  require_mine(lock);
  lock.release();
}

bool wait(DeskLock& lock, double timeout_s) {
  require_mine(lock);
  mooncake::GilReleased release;
  return lock.wait(timeout_s);
}

void bind_lock(nb::module_& m) {
  nb::class_<DeskLock>(m, "DeskLock", "Held, as a context manager, by who touches a master's state.")
      .def("__enter__", &acquire)
      .def(
          "__exit__", [](DeskLock& self, const nb::args&) { unlock(self); },
          nb::sig("def __exit__(self, *args: object) -> None"))
      .def("wait", &wait, "timeout_s"_a,
           "Give it up until somebody notifies or the time is over; True in the first case. Raises\n"
           "RuntimeError when this thread does not hold it.")
      .def(
          "notify",
          [](DeskLock& self) {
            require_mine(self);
            self.notify();
          },
          "Wake up who waits. Raises RuntimeError when this thread does not hold it.");
}

// ---- the desk

using CallsTuple = std::tuple<std::string, uint64_t, double, std::vector<uint64_t>>;

std::vector<CallsTuple> take_calls(Desk& self) {
  std::vector<CallsTuple> found;
  auto calls = self.take_calls();
  for (size_t kind = 1; kind < kExpressKinds; ++kind) {
    if (calls[kind].count == 0) continue;
    const auto& buckets = calls[kind].buckets;
    found.emplace_back(kNames[kind], calls[kind].count, calls[kind].total_s,
                       std::vector<uint64_t>(buckets.begin(), buckets.end()));
  }
  return found;
}

std::vector<std::tuple<nb::bytes, uint32_t>> take_samples(Desk& self) {
  std::vector<std::tuple<nb::bytes, uint32_t>> found;
  for (const auto& [digest, weight] : self.take_samples()) {
    found.emplace_back(bytes_of(&digest, sizeof(digest)), weight);
  }
  return found;
}

std::vector<std::tuple<uint64_t, uint64_t>> reads(const Desk& self) {
  std::vector<std::tuple<uint64_t, uint64_t>> found;
  for (const auto& reads : self.reads()) found.emplace_back(reads.hits, reads.misses);
  return found;
}

void init_desk(Desk* self, Map& map, GrantTable& leases, GrantTable& reservations, uint64_t epoch,
               uint64_t most_record_bytes) {
  new (self) Desk(map.core(), leases, reservations, epoch, most_record_bytes);
  if (!map.compiled()) self->close();
}

std::vector<std::tuple<nb::bytes, uint64_t>> take_touches(Desk& self) {
  std::vector<std::tuple<nb::bytes, uint64_t>> found;
  for (const auto& [digest, segment] : self.take_touches()) {
    found.emplace_back(bytes_of(&digest, sizeof(digest)), segment);
  }
  return found;
}

void admit(Desk& self, uint64_t client, uint64_t connection, uint32_t number, uint64_t node, uint16_t tenant,
           bool express, const nb::bytes& own_prefix) {
  self.admit(client, {connection, number, node, tenant, express, {own_prefix.c_str(), own_prefix.size()}});
}

void bind_tenure(nb::module_& m) {
  nb::class_<Tenure>(m, "Tenure",
                     "A leadership: until when nobody else can lead, as the candidate has last heard.")
      .def(nb::init<>())
      .def("last", &Tenure::last, "until_s"_a, "Of CLOCK_BOOTTIME; 0: it is over.")
      .def("held", &Tenure::held);
}

void bind_desk_itself(nb::module_& m) {
  nb::class_<Desk>(m, "Desk",
                   "Answers the usual requests of members without the interpreter. All calls: with its lock "
                   "held,\nonce it is at a port.")
      .def("__init__", &init_desk, "map"_a, "leases"_a, "reservations"_a, "epoch"_a, "most_record_bytes"_a,
           nb::keep_alive<1, 2>(), nb::keep_alive<1, 3>(), nb::keep_alive<1, 4>())
      .def_prop_ro("lock", &Desk::lock, nb::rv_policy::reference_internal)
      .def("close", &Desk::close, "From now on everything goes the other way.")
      .def_prop_ro("is_open", &Desk::is_open)
      .def("lead", &Desk::lead, "tenure"_a, "From now on nobody is answered but in this leadership.")
      .def(
          "note_touches", &Desk::note_touches,
          "There are tiers: from now on only what lies in memory is read here, and take_touches tells of it.")
      .def("take_touches", &take_touches,
           "Digests read since the last call, each with the segment of its first byte.")
      .def("admit", &admit, "client"_a, "connection"_a, "number"_a, "node"_a, "tenant"_a, "express"_a,
           "own_prefix"_a,
           "A member has joined. express: it may be answered here. own_prefix: not empty for who sees "
           "objects\n"
           "of its tenant only; what goes before keys in what their digests are made of.")
      .def("drop", &Desk::drop, "client"_a)
      .def("heard_s", &Desk::heard_s, "client"_a, "When a member was last answered here; 0: never.")
      .def(
          "describe",
          [](Desk& self, uint64_t segment, const nb::bytes& descriptor) {
            self.describe(segment, std::string(descriptor.c_str(), descriptor.size()));
          },
          "segment"_a, "descriptor"_a)
      .def("forget", &Desk::forget, "segment"_a)
      .def("count", &Desk::count, "tenant"_a, "hits"_a, "misses"_a, "Keys were looked for, to be read.")
      .def("reads", &reads, "Hits and misses of each tenant, by its number.")
      .def("take_samples", &take_samples,
           "Digests of some of what was read since the last call, and for how many reads each stands.")
      .def("take_calls", &take_calls,
           "Name, number, seconds and telemetry's buckets of the requests answered here since the last call.")
      .def("take_rings", &Desk::take_rings, "Members to be told that records wait; see ObjectMap.");
}

// ---- the port

struct Handler {
  mc_handler_v1 head;
  std::shared_ptr<DeskPort> port;
};

void answer(void* context, uint64_t connection, const void* body, size_t nbytes, void* reply,
            void (*write)(void*, const void*, size_t)) {
  auto* port = static_cast<DeskPort*>(context);
  try {
    std::string found = port->answer(connection, {static_cast<const char*>(body), nbytes});
    write(reply, found.data(), found.size());
  } catch (const std::exception&) {
    // No memory: an empty answer sends who asked the other way, which can say so.
  }
}

nb::capsule handler_of(const std::shared_ptr<DeskPort>& port) {
  auto* handler = new Handler{
      {MC_HANDLER_ABI_MAJOR, MC_HANDLER_ABI_MINOR, sizeof(mc_handler_v1), port.get(), &answer}, port};
  return nb::capsule(handler, MC_HANDLER_CAPSULE, [](void* p) noexcept { delete static_cast<Handler*>(p); });
}

// The port as Python holds it; whoever has its handler keeps it, too.
struct Port {
  std::shared_ptr<DeskPort> port = std::make_shared<DeskPort>();
};

void bind_port(nb::module_& m) {
  nb::class_<Port>(m, "DeskPort", "Where an engine's channel finds the desk of the master that it serves.")
      .def(nb::init<>())
      .def(
          "handler", [](Port& self) { return handler_of(self.port); },
          "What TransferEngine.serve_compiled takes.")
      .def(
          "attach", [](Port& self, Desk& desk) { self.port->attach(&desk); }, "desk"_a,
          nb::call_guard<mooncake::GilReleased>(), "Keep the desk until it is detached.")
      .def(
          "detach", [](Port& self) { self.port->detach(); }, nb::call_guard<mooncake::GilReleased>(),
          "Nobody is answered any more when this returns.");
}

}  // namespace

void bind_desk(nb::module_& m) {
  bind_grants(m);
  bind_lock(m);
  bind_tenure(m);
  bind_desk_itself(m);
  bind_port(m);
}

}  // namespace mooncake::store
