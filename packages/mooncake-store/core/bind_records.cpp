// Ledgers and digests for Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <variant>

#include "bind.hpp"
#include "digests.hpp"
#include "ledger.hpp"
#include "support/gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace {

constexpr size_t kMaxKeyBytes = 64u << 10;

// The key's bytes; empty when it is no key.
std::string_view key_view(nb::handle key) {
  Py_ssize_t length = 0;
  const char* text = nullptr;
  if (PyUnicode_Check(key.ptr())) {
    text = PyUnicode_AsUTF8AndSize(key.ptr(), &length);
    if (text == nullptr) PyErr_Clear();
  } else if (PyBytes_Check(key.ptr())) {
    text = PyBytes_AsString(key.ptr());
    length = PyBytes_Size(key.ptr());
  }
  auto size = static_cast<size_t>(length);
  return text == nullptr || size > kMaxKeyBytes ? std::string_view() : std::string_view(text, size);
}

nb::bytes key_digests(const nb::bytes& prefix, const nb::list& keys) {
  std::vector<uint8_t> digests(kDigestBytes * keys.size()), buffer(prefix.size() + 256);
  if (prefix.size() < kDigestBytes) throw nb::value_error("the prefix must have at least 16 bytes");
  std::memcpy(buffer.data(), prefix.c_str(), prefix.size());
  size_t position = 0;
  for (nb::handle key : keys) {
    std::string_view bytes = key_view(key);
    if (bytes.empty()) throw nb::value_error("a key is empty, too long, or neither text nor bytes");
    if (buffer.size() < prefix.size() + bytes.size()) buffer.resize(prefix.size() + bytes.size());
    std::memcpy(buffer.data() + prefix.size(), bytes.data(), bytes.size());
    xxh3_128(buffer.data(), prefix.size() + bytes.size(), digests.data() + kDigestBytes * position++);
  }
  return nb::bytes(reinterpret_cast<const char*>(digests.data()), digests.size());
}

using Departures = std::vector<std::tuple<nb::bytes, nb::bytes, std::string>>;

nb::bytes value_sums(uint64_t address, uint64_t nbytes, const nb::bytes& offsets, const nb::bytes& sizes) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(address);
  std::string_view at = view(offsets), lengths = view(sizes);
  if (at.size() != lengths.size()) throw nb::value_error("offsets and sizes must have one length");
  std::vector<uint64_t> starts(at.size() / 8), counts(at.size() / 8), sums;
  if (!starts.empty()) std::memcpy(starts.data(), at.data(), 8 * starts.size());
  if (!starts.empty()) std::memcpy(counts.data(), lengths.data(), 8 * counts.size());
  for (size_t i = 0; i < starts.size(); ++i) {
    bool inside = counts[i] <= nbytes && starts[i] <= nbytes - counts[i];
    if (!inside) throw nb::value_error("a value does not lie in the memory");
  }
  {
    mooncake::GilReleased release;
    for (size_t i = 0; i < starts.size(); ++i) sums.push_back(value_sum(bytes + starts[i], counts[i]));
  }
  return nb::bytes(reinterpret_cast<const char*>(sums.data()), 8 * sums.size());
}

Departures take(Ledger& self, uint64_t first, const nb::bytes& frames) {
  std::vector<Ledger::Departed> departed;
  if (!self.take(first, view(frames), departed)) {
    throw nb::value_error("the page has bytes that are no records of this version");
  }
  Departures told;
  for (const auto& gone : departed) {
    told.emplace_back(as_bytes({reinterpret_cast<const char*>(&gone.digest), sizeof(gone.digest)}),
                      as_bytes(gone.key), gone.tenant);
  }
  return told;
}

std::optional<nb::bytes> part(const Ledger& self, uint64_t number) {
  auto found = self.part(number);
  return found ? std::optional(as_bytes(*found)) : std::nullopt;
}

using Entry = std::tuple<uint8_t, uint8_t, uint64_t, nb::bytes, nb::bytes, uint64_t, std::string, std::string,
                         uint8_t, double, std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint8_t>>>;

std::vector<Entry> read_records(const nb::bytes& frames) {
  std::vector<Entry> entries;
  std::string_view rest = view(frames);
  RecordView record;
  while (!rest.empty()) {
    if (!take_record(rest, record)) throw nb::value_error("bytes that are no records of this version");
    std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint8_t>> extents;
    for (const RecordExtent& extent : record.extents) {
      extents.emplace_back(extent.segment, extent.offset, extent.nbytes(), extent.replica());
    }
    std::string_view digest{reinterpret_cast<const char*>(&record.head.digest), sizeof(record.head.digest)};
    entries.emplace_back(record.head.kind, record.head.flags, record.head.version, as_bytes(digest),
                         as_bytes(record.key), record.body.nbytes, std::string(record.tenant),
                         std::string(record.group), record.head.priority, record.body.soft_pin_s,
                         std::move(extents));
  }
  return entries;
}

std::vector<std::tuple<nb::bytes, uint64_t>> tenant_keys(const nb::bytes& frames, const std::string& tenant,
                                                         const nb::bytes& begin) {
  std::vector<std::tuple<nb::bytes, uint64_t>> keys;
  std::string_view rest = view(frames), wanted = view(begin);
  RecordView record;
  while (!rest.empty()) {
    if (!take_record(rest, record)) throw nb::value_error("bytes that are no records of this version");
    if (record.tenant != tenant || record.key.substr(0, wanted.size()) != wanted) continue;
    keys.emplace_back(as_bytes(record.key), record.body.nbytes);
  }
  return keys;
}

}  // namespace

void bind_records(nb::module_& m) {
  nb::class_<Ledger>(m, "Ledger", "What an owner knows of the values in its segment. Not thread-safe.")
      .def(nb::init<>())
      .def("take", &take, "first"_a, "frames"_a,
           "Take a page of records. Digest, key (empty when it is not known here) and tenant of what its\n"
           "user is to be told has gone. Raises ValueError for bytes that are no records.")
      .def("restart", &Ledger::restart, "keep"_a, "A new master counts from 1; keep what is held, or not.")
      .def_prop_ro("seen", &Ledger::seen, "Number of the last record taken.")
      .def_prop_ro("last_version", &Ledger::last_version, "The highest version that ever stood here.")
      .def("__len__", &Ledger::size)
      .def_prop_ro("nbytes", &Ledger::bytes, "Memory that the records take.")
      .def(
          "find",
          [](const Ledger& self, uint64_t version) {
            auto found = self.find(version);
            return found ? std::optional(as_bytes(*found)) : std::nullopt;
          },
          "version"_a, "The record of a version, as a frame; None when there is none.")
      .def("part", &part, "number"_a,
           "The standing records of one part, about 1 MiB of frames; None beyond the last part. What comes "
           "or\n"
           "goes meanwhile may be missed or come twice; what stands throughout is not missed.");
  m.def("read_records", &read_records, "frames"_a,
        "Kind (1: stored, 2: gone, 3: changed), flags (1: to be told, 2: pinned), version, digest, key, "
        "bytes,\n"
        "tenant, group, priority, seconds of the soft pin, and extents (segment, offset, bytes, replica) of "
        "each\n"
        "frame. Raises ValueError.");
  m.def("tenant_keys", &tenant_keys, "frames"_a, "tenant"_a, "begin"_a,
        "Key and bytes of each record of a tenant whose key begins so. Raises ValueError.");
  m.def("value_sums", &value_sums, "address"_a, "nbytes"_a, "offsets"_a, "sizes"_a,
        "Checksums (uint64) of values in memory, given by offset and size (uint64); see core/digests.hpp.");
  m.def("key_digests", &key_digests, "prefix"_a, "keys"_a,
        nb::sig("def key_digests(prefix: bytes, keys: list[str | bytes]) -> bytes"),
        "xxh3-128 of the prefix and each key (text is UTF-8): 16 bytes each. Raises ValueError for a key "
        "that is\n"
        "empty, longer than 64 KiB or of another type.");
}

}  // namespace mooncake::store
