// The client's quick calls for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>

#include "bind.hpp"
#include "digests.hpp"
#include "quick.hpp"
#include "support/gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace quickly {

namespace {

constexpr size_t kMostKeyBytes = 64 << 10;  // config.MAX_KEY_BYTES
constexpr const char* kNames[Quick::kCounted] = {"get", "put", "master.Locate", "master.Reserve",
                                                 "master.Commit"};

const mc_calls_v1* calls_of(const nb::object& capsule) {
  auto* calls = static_cast<const mc_calls_v1*>(PyCapsule_GetPointer(capsule.ptr(), MC_CALLS_CAPSULE));
  if (calls == nullptr) throw nb::python_error();
  if (calls->abi_major != MC_CALLS_ABI_MAJOR || calls->struct_size < sizeof(mc_calls_v1))
    throw nb::value_error("the engine's compiled calls are of another version");
  return calls;
}

struct Client {
  Client(nb::object capsule, const std::string& method, const nb::bytes& prefix, nb::object wake,
         double call_s, double transfer_s, bool sums)
      : capsule(std::move(capsule)),
        wake(std::move(wake)),
        prefix(view(prefix)),
        quick(calls_of(this->capsule), method, {call_s, transfer_s}, sums) {}

  nb::object capsule, wake;
  std::string prefix;
  Quick quick;
};

// Kept for the time of one call.
class LocalRegion {
 public:
  LocalRegion(const mc_calls_v1* calls, nb::handle region)
      : calls_(calls), kept_(calls->keep_region(calls->context, region.ptr())) {}
  ~LocalRegion() {
    if (kept_ != nullptr) calls_->drop_region(kept_);
  }
  LocalRegion(const LocalRegion&) = delete;
  void* get() const { return kept_; }

 private:
  const mc_calls_v1* calls_;
  void* kept_;
};

// What quick calls may look into; only main memory has an address and no device.
Quick::Memory memory_of(const LocalRegion& local, nb::handle region) {
  nb::object address = region.attr("address"), device = region.attr("device");
  bool here = PyLong_Check(address.ptr()) && PyLong_AsLong(device.ptr()) == -1;
  uint64_t at = here ? PyLong_AsUnsignedLongLong(address.ptr()) : 0;
  PyErr_Clear();
  return {local.get(), reinterpret_cast<const uint8_t*>(at)};
}

// False for what is no key; the other way then says why.
bool take_key(nb::handle key, std::string_view* text) {
  Py_ssize_t length = 0;
  const char* data = nullptr;
  if (PyUnicode_Check(key.ptr())) {
    data = PyUnicode_AsUTF8AndSize(key.ptr(), &length);
  } else if (PyBytes_Check(key.ptr())) {
    char* bytes = nullptr;
    if (PyBytes_AsStringAndSize(key.ptr(), &bytes, &length) == 0) data = bytes;
  }
  PyErr_Clear();
  if (data == nullptr || length <= 0 || static_cast<size_t>(length) > kMostKeyBytes) return false;
  *text = {data, static_cast<size_t>(length)};
  return true;
}

// A number that is one, without a loss.
bool take_number(nb::handle value, uint64_t* number) {
  if (!PyLong_CheckExact(value.ptr())) return false;
  *number = PyLong_AsUnsignedLongLong(value.ptr());
  bool taken = PyErr_Occurred() == nullptr;
  PyErr_Clear();
  return taken;
}

std::string digest_of(const Client& self, std::string_view key) {
  std::string bytes = self.prefix;
  bytes += key;
  std::string digest(kDigestBytes, '\0');
  xxh3_128(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size(),
           reinterpret_cast<uint8_t*>(digest.data()));
  return digest;
}

// What has gone wrong, as an exception; takes it off the thread.
nb::object failure_of(const Client& self, const QuickResult& result) {
  if (result.failure != nullptr) self.quick.calls()->raise(result.failure);
  if (PyErr_Occurred() == nullptr) return nb::none();
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Py_XDECREF(type);
  Py_XDECREF(trace);
  return nb::steal(value);
}

nb::object hand_over(const Client& self, const QuickResult& result) {
  nb::object failure = failure_of(self, result);
  if (result.stage == Stage::kNothing) return nb::none();
  const Standing& standing = result.standing;
  return nb::make_tuple(static_cast<int>(result.stage), standing.connection, standing.epoch,
                        as_bytes(result.answer), as_bytes(result.committed), result.segment, result.asked_s,
                        static_cast<double>(result.asked_ns) * 1e-9,
                        static_cast<double>(result.late_ns) * 1e-9, failure);
}

void wake(const Client& self, const QuickResult& result) {
  if (result.wake) call_python(self.wake, nb::make_tuple());
}

nb::object get_into(Client& self, nb::handle key, nb::handle region, nb::handle offset, nb::handle nbytes) {
  std::string_view text;
  uint64_t at = 0, room = 0, whole = 0;
  LocalRegion local(self.quick.calls(), region);
  bool usual = local.get() != nullptr && take_key(key, &text) && take_number(offset, &at) &&
               take_number(nbytes, &room) && take_number(region.attr("nbytes"), &whole);
  if (!usual || at > whole || room > whole - at) return nb::none();
  std::string digest = digest_of(self, text);
  Quick::Memory memory = memory_of(local, region);
  QuickResult result;
  {
    GilReleased release;
    result = self.quick.get(digest, memory, at, room);
  }
  if (result.stage != Stage::kDone) return hand_over(self, result);
  wake(self, result);
  return nb::int_(result.nbytes);
}

nb::object get(Client& self, nb::handle key, nb::handle staging) {
  std::string_view text;
  uint64_t whole = 0, address = 0;
  LocalRegion local(self.quick.calls(), staging);
  bool usual = local.get() != nullptr && take_key(key, &text) &&
               take_number(staging.attr("nbytes"), &whole) && take_number(staging.attr("address"), &address);
  if (!usual) return nb::none();
  std::string digest = digest_of(self, text);
  Quick::Memory memory{local.get(), reinterpret_cast<const uint8_t*>(address)};
  QuickResult result;
  {
    GilReleased release;
    result = self.quick.get(digest, memory, 0, whole);
  }
  if (result.stage != Stage::kDone) return hand_over(self, result);
  wake(self, result);
  return nb::bytes(reinterpret_cast<const char*>(address), result.nbytes);
}

nb::object put_from(Client& self, nb::handle key, nb::handle region, nb::handle offset, nb::handle nbytes,
                    bool replace, uint64_t seen_epoch, uint64_t seen) {
  std::string_view text;
  uint64_t at = 0, size = 0, whole = 0;
  LocalRegion local(self.quick.calls(), region);
  bool usual = local.get() != nullptr && take_key(key, &text) && take_number(offset, &at) &&
               take_number(nbytes, &size) && take_number(region.attr("nbytes"), &whole);
  if (!usual || at > whole || size > whole - at) return nb::none();
  std::string digest = digest_of(self, text);
  Quick::Memory memory = memory_of(local, region);
  QuickResult result;
  {
    GilReleased release;
    result = self.quick.put(digest, text, replace, memory, at, size, seen_epoch, seen);
  }
  if (result.stage != Stage::kDone || !result.committed.empty()) return hand_over(self, result);
  return nb::bool_(true);
}

void know(Client& self, uint64_t segment, const nb::bytes& descriptor, nb::handle remote, bool checked) {
  const mc_calls_v1* calls = self.quick.calls();
  void* kept = calls->keep_remote(calls->context, remote.ptr());
  if (kept != nullptr) self.quick.know(segment, std::string(view(descriptor)), kept, checked);
}

using CallsTuple = std::tuple<std::string, uint64_t, uint64_t, double, std::vector<uint64_t>>;
using Numbers = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t>;

std::tuple<std::vector<CallsTuple>, Numbers> take_counts(Client& self) {
  Quick::Counts counts = self.quick.take_counts();
  std::vector<CallsTuple> calls;
  for (size_t kind = 0; kind < Quick::kCounted; ++kind) {
    const Quick::Calls& one = counts.calls[kind];
    if (one.count == 0) continue;
    calls.emplace_back(kNames[kind], one.count, one.failures, static_cast<double>(one.total_ns) * 1e-9,
                       std::vector<uint64_t>(one.buckets.begin(), one.buckets.end()));
  }
  return {calls, {counts.hits, counts.misses, counts.read_bytes, counts.stored, counts.written_bytes}};
}

void bind(nb::module_& m) {
  nb::class_<Client>(
      m, "Quick",
      "The usual get and put of one value, without the interpreter. Thread-safe.\n\n"
      "A call returns what the client's does, None when it has done nothing, or else how far it\n"
      "has come, as quick.Handed.")
      .def(nb::init<nb::object, const std::string&, const nb::bytes&, nb::object, double, double, bool>(),
           "calls"_a, "method"_a, "prefix"_a, "wake"_a, "call_timeout_s"_a, "transfer_timeout_s"_a, "sums"_a,
           nb::sig("def __init__(self, calls: object, method: str, prefix: bytes, wake: "
                   "collections.abc.Callable[[], None], call_timeout_s: float, transfer_timeout_s: float, "
                   "sums: bool) -> None"))
      .def(
          "join",
          [](Client& self, uint64_t connection, uint64_t epoch, uint64_t client, double lease_ttl_s,
             double reservation_ttl_s, double joined_s) {
            self.quick.join({connection, epoch, client, lease_ttl_s, reservation_ttl_s, joined_s});
          },
          "connection"_a, "epoch"_a, "client"_a, "lease_ttl_s"_a, "reservation_ttl_s"_a, "joined_s"_a,
          "The client is a member of the master at the other end of the connection, since joined_s.")
      .def_prop_ro("joined", [](const Client& self) { return self.quick.joined(); })
      .def(
          "leave", [](Client& self) { self.quick.leave(); }, "It is not any more.")
      .def("know", &know, "segment"_a, "descriptor"_a, "remote"_a, "checked"_a,
           nb::sig("def know(self, segment: int, descriptor: bytes, remote: object, checked: bool) -> None"),
           "The segment of this descriptor is reached as this RemoteRegion; what comes from there is "
           "`checked`.")
      .def(
          "forget", [](Client& self, uint64_t segment) { self.quick.forget(segment); }, "segment"_a)
      .def(
          "keep_only",
          [](Client& self, const std::vector<uint64_t>& segments, double asked_s) {
            GilReleased release;
            self.quick.keep_only(segments, static_cast<uint64_t>(asked_s * 1e9));
          },
          "segments"_a, "asked_s"_a, "As Mover.keep_only.")
      .def(
          "end", [](Client& self, uint64_t lease) { self.quick.end({lease}); }, "lease"_a,
          "The next question tells the master that this lease has ended.")
      .def(
          "take_ended", [](Client& self) { return self.quick.take_ended(); },
          "Leases that have ended and that the master was not told of; that is the caller's now.")
      .def(
          "ended_for_s", [](Client& self) { return static_cast<double>(self.quick.ended_for()) * 1e-9; },
          "For how long the oldest of them has waited; 0 when there are none.")
      .def(
          "leases", [](Client& self) { return self.quick.leases(); },
          "Those under which something is being read.")
      .def(
          "idle", [](Client& self) { self.quick.idle(); }, "Call `wake` when the next lease ends.")
      .def(
          "take_counts", &take_counts,
          "Name, number, failures, seconds and telemetry's buckets of calls, then hits, misses, bytes read,\n"
          "values stored, bytes written; all since the last call.")
      .def("get_into", &get_into, "key"_a.none(), "region"_a.none(), "offset"_a.none(), "nbytes"_a.none(),
           nb::sig("def get_into(self, key: object, region: object, offset: object, nbytes: object) -> "
                   "typing.Any"))
      .def("get", &get, "key"_a.none(), "staging"_a.none(),
           nb::sig("def get(self, key: object, staging: object) -> typing.Any"))
      .def("put_from", &put_from, "key"_a.none(), "region"_a.none(), "offset"_a.none(), "nbytes"_a.none(),
           "replace"_a, "seen_epoch"_a, "seen"_a,
           nb::sig("def put_from(self, key: object, region: object, offset: object, nbytes: object, replace: "
                   "bool, seen_epoch: int, seen: int) -> typing.Any"));
}

}  // namespace

}  // namespace quickly

void bind_quick(nb::module_& m) { quickly::bind(m); }

}  // namespace mooncake::store
