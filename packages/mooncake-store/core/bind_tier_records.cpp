// What lies in tiers, for Python: digests and rows come and go as one block of bytes.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "bind.hpp"
#include "packed.hpp"
#include "tier_records.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace {

using Where = std::tuple<uint64_t, uint64_t, uint64_t, uint64_t>;

Digest one(const nb::bytes& digest) {
  auto digests = as_span<Digest>(digest, "digest");
  if (digests.size() != 1) throw nb::value_error("a digest has 16 bytes");
  return digests[0];
}

TierRecords::Where where_of(const Where& given) {
  auto [tier, epoch, version, nbytes] = given;
  return {tier, epoch, version, nbytes};
}

std::vector<Where> tuples(const std::vector<TierRecords::Where>& found) {
  std::vector<Where> all;
  for (const auto& [tier, epoch, version, nbytes] : found) all.emplace_back(tier, epoch, version, nbytes);
  return all;
}

void enter(TierRecords& self, const nb::bytes& digest, const Where& where,
           std::optional<std::string_view> tenant, uint16_t round) {
  uint64_t tier = std::get<0>(where);
  if (tier == 0 || tier > TierRecords::kMaxTier) {
    throw nb::value_error(("there is no tier of number " + std::to_string(tier)).c_str());
  }
  self.enter(one(digest), where_of(where), tenant, round);
}

nb::bytes rows(const TierRecords& self, const nb::bytes& digests, const nb::bytes& skip,
               const std::vector<uint64_t>& tiers) {
  auto asked = as_span<Digest>(digests, "digests");
  auto skipped = as_span<uint8_t>(skip, "skip");
  if (asked.size() != skipped.size()) throw nb::value_error("skip has one byte a digest");
  return packed(self.rows(asked, skipped, tiers));
}

void bind_changes(nb::class_<TierRecords>& c) {
  c.def(
       "enter", &enter, "digest"_a, "where"_a, "tenant"_a.none(), "round"_a,
       "A record (tier, epoch, version, bytes) is there, and was named in this round of its tier, which has\n"
       "no other of that key. tenant: None when nobody knows. Raises ValueError.")
      .def(
          "name",
          [](TierRecords& self, const nb::bytes& digest, const Where& where, uint16_t round) {
            return self.name(one(digest), where_of(where), round);
          },
          "digest"_a, "where"_a, "round"_a,
          "Whether exactly this one is there; from now on as one that was named in this round.")
      .def(
          "forget",
          [](TierRecords& self, const nb::bytes& digest) { return tuples(self.forget(one(digest))); },
          "digest"_a, "All of a key go; what that was.")
      .def(
          "lose",
          [](TierRecords& self, const nb::bytes& digest, uint64_t tier, uint64_t epoch, uint64_t version) {
            return self.lose(one(digest), tier, epoch, version);
          },
          "digest"_a, "tier"_a, "epoch"_a, "version"_a, "One goes, of whatever size; whether it was there.")
      .def(
          "purge",
          [](TierRecords& self, uint64_t tier, uint16_t round, uint32_t first, uint32_t most) {
            auto [gone, next] = self.purge(tier, round, first, most);
            return std::tuple(gone, next);
          },
          "tier"_a, "round"_a, "first"_a = 0, "most"_a = UINT32_MAX,
          "Go through so many places: what is of this tier, and was not named in this round, goes. How "
          "many,\n"
          "and where to go on; None: this was all.");
}

}  // namespace

void bind_tier_records(nb::module_& m) {
  nb::class_<TierRecords> c(m, "TierRecords",
                            "What lies in tiers, as far as a master knows. Not thread-safe.");
  c.def(nb::init<>());
  bind_changes(c);
  c.def("__len__", &TierRecords::size)
      .def_prop_ro("nbytes", &TierRecords::nbytes, "Memory that they take.")
      .def("__contains__",
           [](const TierRecords& self, const nb::bytes& digest) { return self.has(one(digest)); })
      .def(
          "find",
          [](const TierRecords& self, const nb::bytes& digest) { return tuples(self.find(one(digest))); },
          "digest"_a, "Those of a key as (tier, epoch, version, bytes), by number of the tier.")
      .def(
          "count",
          [](const TierRecords& self, uint64_t tier) {
            auto [records, value_bytes] = self.count(tier);
            return std::tuple(records, value_bytes);
          },
          "tier"_a, "Records of a tier, and bytes of their values.")
      .def(
          "reachable",
          [](const TierRecords& self, const nb::bytes& digests, const std::vector<uint64_t>& tiers) {
            return packed(self.reachable(as_span<Digest>(digests, "digests"), tiers));
          },
          "digests"_a, "tiers"_a, "One byte per digest: whether one of these tiers has it.")
      .def("rows", &rows, "digests"_a, "skip"_a, "tiers"_a,
           "Rows of position, tier, epoch, version, bytes: for each digest of which skip says 0, the record "
           "in\n"
           "the first of these tiers that has one.")
      .def(
          "own",
          [](const TierRecords& self, const nb::bytes& digests, std::string_view tenant) {
            return packed(self.own(as_span<Digest>(digests, "digests"), tenant));
          },
          "digests"_a, "tenant"_a,
          "The digests, but zeros in place of those that are known here, and not as this tenant's.")
      .def(
          "of_tenant",
          [](const TierRecords& self, std::string_view tenant) { return packed(self.of_tenant(tenant)); },
          "tenant"_a, "Digests of what is this tenant's, or may be.");
}

}  // namespace mooncake::store
