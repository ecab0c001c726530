// The object map for Python: what there is one of per key comes and goes as one block of bytes.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "bind.hpp"
#include "bind_map.hpp"
#include "eviction_queue.hpp"
#include "object_map.hpp"
#include "packed.hpp"
#include "support/gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::store {

namespace {

// One of this package's policies that keeps its own nodes.
class CompiledOrder final : public ForeignOrder {
 public:
  explicit CompiledOrder(std::unique_ptr<EvictionQueue> queue) : queue_(std::move(queue)) {}
  void insert(uint64_t id, uint64_t key, uint64_t nbytes) override { queue_->insert(id, key, nbytes); }
  void touch(uint64_t id) override { queue_->touch(id); }
  void pin(uint64_t id) override { queue_->pin(id); }
  void unpin(uint64_t id) override { queue_->unpin(id); }
  void remove(uint64_t id) override { queue_->remove(id); }
  std::optional<uint64_t> victim() override { return queue_->victim(); }

 private:
  std::unique_ptr<EvictionQueue> queue_;
};

// A plugin's policy; the lock of the interpreter is held.
class PythonOrder final : public ForeignOrder {
 public:
  explicit PythonOrder(nb::object policy) : policy_(std::move(policy)) {}
  void insert(uint64_t id, uint64_t key, uint64_t nbytes) override {
    ask("insert", nb::make_tuple(one(id), one(key), one(nbytes)));
  }
  void touch(uint64_t id) override { ask("touch", nb::make_tuple(one(id))); }
  void pin(uint64_t id) override { ask("pin", nb::make_tuple(one(id))); }
  void unpin(uint64_t id) override { ask("unpin", nb::make_tuple(one(id))); }
  void remove(uint64_t id) override { ask("remove", nb::make_tuple(one(id))); }
  std::optional<uint64_t> victim() override {
    nb::object found = ask("victim", nb::make_tuple());
    return found.is_none() ? std::nullopt : std::optional(nb::cast<uint64_t>(found));
  }

 private:
  static nb::object one(uint64_t value) {
    nb::object numpy = nb::module_::import_("numpy");
    return numpy.attr("array")(nb::make_tuple(value), numpy.attr("uint64"));
  }
  nb::object ask(const char* method, const nb::tuple& arguments) const {
    return mooncake::call_python(policy_.attr(method), arguments);
  }

  nb::object policy_;
};

Orders::Kind kind_of(const nb::object& eviction) {
  if (!nb::isinstance<nb::str>(eviction)) return Orders::Kind::kForeign;
  auto name = nb::cast<std::string>(eviction);
  return name == "clock" ? Orders::Kind::kClock : name == "lru" ? Orders::Kind::kLru : Orders::Kind::kForeign;
}

Orders::Make maker_of(const nb::object& eviction) {
  if (!nb::isinstance<nb::str>(eviction)) {
    return [eviction] {
      return std::make_unique<PythonOrder>(mooncake::call_python(eviction, nb::make_tuple()));
    };
  }
  auto name = nb::cast<std::string>(eviction);
  if (EvictionQueue::make(name) == nullptr) {
    throw nb::value_error(("there is no eviction policy '" + name + "' here").c_str());
  }
  return [name] { return std::make_unique<CompiledOrder>(EvictionQueue::make(name)); };
}

std::vector<uint64_t> segments_in(const std::vector<Rows>& all) {
  std::vector<uint64_t> found;
  for (const Rows& rows : all) {
    for (size_t i = 2; i < rows.size(); i += 5) {
      if (!found.empty() && found.back() == rows[i]) continue;
      if (std::find(found.begin(), found.end(), rows[i]) == found.end()) found.push_back(rows[i]);
    }
  }
  return found;
}

void require(bool so, const char* what) {
  if (!so) throw nb::value_error(what);
}

void require_reserved(const ObjectMap& map, std::span<const uint32_t> slots) {
  for (uint32_t at : slots) require(map.is_reserved(at), "a slot is not reserved");
}

using Segments_ = std::vector<uint64_t>;
using LocatedTuple = std::tuple<nb::bytes, nb::bytes, nb::bytes, std::vector<nb::bytes>, Segments_>;
using ReservedTuple = std::tuple<nb::bytes, nb::bytes, nb::bytes, Segments_, bool>;

nb::bytes exist(Map& self, const nb::bytes& digests) {
  auto asked = as_span<Digest>(digests, "digests");
  return packed(self.batch([&](ObjectMap& map) { return map.exist(asked); }));
}

nb::bytes sizes(Map& self, const nb::bytes& digests) {
  auto asked = as_span<Digest>(digests, "digests");
  return packed(self.batch([&](ObjectMap& map) { return map.sizes(asked); }));
}

nb::bytes own(Map& self, const nb::bytes& digests, uint16_t tenant) {
  auto asked = as_span<Digest>(digests, "digests");
  return packed(self.batch([&](ObjectMap& map) { return map.own(asked, tenant); }));
}

LocatedTuple locate(Map& self, const nb::bytes& digests, uint32_t reader, uint64_t node) {
  auto asked = as_span<Digest>(digests, "digests");
  Located located = self.batch([&](ObjectMap& map) { return map.locate(asked, reader, node); });
  std::vector<nb::bytes> replicas;
  for (const Rows& rows : located.replicas) replicas.push_back(packed(rows));
  return {packed(located.found), packed(located.sizes), packed(located.slots), std::move(replicas),
          segments_in(located.replicas)};
}

std::vector<uint32_t> release(Map& self, const nb::bytes& slots) {
  auto given = as_span<uint32_t>(slots, "slots");
  for (uint32_t at : given) require(self.core().is_leased(at), "a slot has no lease");
  return self.batch([&](ObjectMap& map) { return map.release(given); });
}

ReservedTuple reserve(Map& self, const nb::bytes& digests, const nb::bytes& sizes, const PutOptions& put) {
  auto asked = as_span<Digest>(digests, "digests");
  auto wanted = as_span<uint64_t>(sizes, "sizes");
  require(asked.size() == wanted.size(), "digests and sizes must have one length");
  Reserved reserved = self.batch([&](ObjectMap& map) { return map.reserve(asked, wanted, put); });
  Segments_ segments = segments_in({reserved.rows});
  return {packed(reserved.outcomes), packed(reserved.slots), packed(reserved.rows), std::move(segments),
          reserved.wait};
}

nb::bytes commit(Map& self, const nb::bytes& slots, const std::vector<uint32_t>& failed, const nb::list& keys,
                 bool replace, double now_s) {
  auto given = as_span<uint32_t>(slots, "slots");
  require_reserved(self.core(), given);
  require(keys.size() == given.size(), "there must be a key for each slot");
  std::vector<uint8_t> is_failed(given.size());
  for (uint32_t position : failed) {
    require(position < given.size(), "a position of `failed` is beyond the slots");
    is_failed[position] = 1;
  }
  std::vector<std::string_view> names;
  names.reserve(given.size());
  for (nb::handle key : keys) {
    auto bytes = nb::borrow<nb::bytes>(key);
    names.emplace_back(bytes.c_str(), bytes.size());
  }
  return packed(
      self.batch([&](ObjectMap& map) { return map.commit(given, is_failed, names, replace, now_s); }));
}

void set_sums(Map& self, const nb::bytes& slots, const nb::bytes& sums) {
  auto given = as_span<uint32_t>(slots, "slots");
  auto known = as_span<uint64_t>(sums, "sums");
  require_reserved(self.core(), given);
  require(given.size() == known.size(), "there must be a sum for each slot");
  self.batch([&](ObjectMap& map) { map.set_sums(given, known); });
}

nb::bytes sums_of(Map& self, const nb::bytes& slots) {
  auto given = as_span<uint32_t>(slots, "slots");
  std::vector<uint64_t> sums;
  for (uint32_t at : given) {
    require(self.core().is_slot(at), "there is no such slot");
    sums.push_back(self.core().sum_at(at));
  }
  return packed(sums);
}

bool condemn(Map& self, uint32_t at, uint64_t segment) {
  require(self.core().is_leased(at), "a slot has no lease");
  return self.batch([&](ObjectMap& map) { return map.condemn(at, segment); });
}

void abandon(Map& self, const nb::bytes& slots) {
  auto given = as_span<uint32_t>(slots, "slots");
  require_reserved(self.core(), given);
  self.batch([&](ObjectMap& map) { map.abandon(given); });
}

nb::bytes remove(Map& self, const nb::bytes& digests) {
  auto asked = as_span<Digest>(digests, "digests");
  return packed(self.batch([&](ObjectMap& map) { return map.remove(asked); }));
}

nb::bytes pin(Map& self, const nb::bytes& digests, bool hard, double soft_until_s, double now_s) {
  auto asked = as_span<Digest>(digests, "digests");
  return packed(self.batch([&](ObjectMap& map) { return map.pin(asked, hard, soft_until_s, now_s); }));
}

nb::bytes unpin(Map& self, const nb::bytes& digests) {
  auto asked = as_span<Digest>(digests, "digests");
  return packed(self.batch([&](ObjectMap& map) { return map.unpin(asked); }));
}

void add_segment(Map& self, uint64_t id, uint32_t owner, uint64_t node, uint64_t nbytes, bool confirms) {
  if (!self.core().add_segment(id, owner, node, nbytes, confirms)) {
    throw nb::value_error(("segment " + std::to_string(id) +
                           " is there already, is too large for its granules, or is one too many")
                              .c_str());
  }
}

std::tuple<uint64_t, uint64_t, uint64_t> adopt(Map& self, uint64_t segment, const nb::bytes& frames,
                                               double now_s) {
  Adoption adoption;
  std::string_view bytes(frames.c_str(), frames.size());
  bool good = self.batch([&](ObjectMap& map) { return map.adopt(segment, bytes, now_s, adoption); });
  require(good, "there is no such segment, or the bytes are no records of this version");
  return {adoption.adopted, adoption.waiting, adoption.refused};
}

std::vector<std::tuple<uint64_t, nb::bytes>> records(Map& self, uint32_t member, uint64_t most_bytes) {
  std::vector<std::tuple<uint64_t, nb::bytes>> pages;
  RecordStream* stream = self.core().stream(member);
  if (stream == nullptr) return pages;
  for (const RecordPage* page : stream->read(most_bytes)) {
    pages.emplace_back(page->first, nb::bytes(page->frames.data(), page->frames.size()));
  }
  return pages;
}

std::vector<uint64_t> segment_room(Map& self, uint64_t id) {
  const Segments& all = self.core().segments();
  auto number = all.find(id);
  if (!number) throw nb::key_error(("there is no segment " + std::to_string(id)).c_str());
  const Segment& segment = all[*number];
  std::vector<uint64_t> found{segment.space.capacity(), segment.space.free(), segment.space.largest_hole()};
  for (Use use : {Use::kEvictable, Use::kLeased, Use::kReserved, Use::kKept, Use::kRetiring}) {
    found.push_back(segment.used[static_cast<size_t>(use)]);
  }
  for (uint64_t& granules : found) granules *= all.granule_bytes();
  found.push_back(segment.value_bytes);
  return found;
}

std::tuple<uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t> room(Map& self) {
  const Segments& all = self.core().segments();
  return {all.capacity_bytes(),
          all.free_bytes(),
          all.used_bytes(Use::kEvictable),
          all.used_bytes(Use::kLeased),
          all.used_bytes(Use::kReserved),
          all.used_bytes(Use::kKept),
          all.used_bytes(Use::kRetiring)};
}

using Description = std::tuple<uint64_t, nb::bytes, uint64_t, std::string, uint32_t, bool, uint32_t,
                               std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint8_t>>>;

std::vector<Description> describe(Map& self) {
  std::vector<Description> all;
  const char* names[] = {"free", "reserved", "committed", "hidden"};
  const Segments& segments = self.core().segments();
  self.core().for_each([&](const Slot& slot, const std::vector<Extent>& extents) {
    std::vector<std::tuple<uint64_t, uint64_t, uint64_t, uint8_t>> where;
    for (const Extent& extent : extents) {
      uint64_t offset = extent.granule * segments.granule_bytes();
      if (segments[extent.segment].there) {
        where.emplace_back(segments[extent.segment].id, offset, extent.nbytes, extent.replica);
      }
    }
    nb::bytes digest(reinterpret_cast<const char*>(&slot.digest), sizeof(slot.digest));
    all.emplace_back(slot.version, digest, slot.nbytes, names[static_cast<size_t>(slot.state)], slot.leases,
                     slot.broken, slot.level, std::move(where));
  });
  return all;
}

using Begun = std::tuple<uint8_t, uint32_t, uint64_t, nb::bytes, nb::bytes, Segments_>;

Begun copy_begin(Map& self, uint32_t at, uint64_t version, uint32_t mover, uint64_t target, uint64_t leaving,
                 bool evicts, bool bounded, const std::vector<uint64_t>& avoid) {
  require(self.core().is_slot(at), "there is no such slot");
  CopyWish wish{mover, target, leaving, evicts, bounded, avoid};
  CopyBegun begun = self.batch([&](ObjectMap& map) { return map.copy_begin({at, version}, wish); });
  return {static_cast<uint8_t>(begun.outcome),
          begun.slot,
          begun.nbytes,
          packed(begun.source),
          packed(begun.target),
          segments_in({begun.source, begun.target})};
}

uint8_t copy_end(Map& self, uint32_t at, const nb::bytes& key, double now_s) {
  require(self.core().is_reserved(at), "a slot is not reserved");
  std::string_view text(key.c_str(), key.size());
  return static_cast<uint8_t>(self.batch([&](ObjectMap& map) { return map.copy_end(at, text, now_s); }));
}

nb::bytes want(Map& self, const nb::bytes& digests, uint8_t replicas) {
  auto asked = as_span<Digest>(digests, "digests");
  require(replicas != 0 && replicas <= kMaxReplicas, "replicas must be 1 to 16");
  return packed(self.batch([&](ObjectMap& map) { return map.want(asked, replicas); }));
}

using Refs = std::vector<std::tuple<uint32_t, uint64_t>>;

std::vector<std::tuple<uint32_t, uint64_t, uint32_t>> take_mending(Map& self, size_t most) {
  std::vector<std::tuple<uint32_t, uint64_t, uint32_t>> found;
  for (const Mending& one : self.core().take_mending(most)) {
    found.emplace_back(one.ref.at, one.ref.version, one.mover);
  }
  return found;
}

std::vector<std::tuple<uint32_t, uint64_t, uint32_t, uint32_t, Segments_>> whereabouts(
    Map& self, const nb::bytes& digests) {
  std::vector<std::tuple<uint32_t, uint64_t, uint32_t, uint32_t, Segments_>> found;
  for (Whereabouts& one : self.core().whereabouts(as_span<Digest>(digests, "digests"))) {
    found.emplace_back(one.ref.at, one.ref.version, one.mover, one.replicas, std::move(one.segments));
  }
  return found;
}

std::tuple<Refs, uint32_t, uint64_t, uint64_t, uint64_t, uint64_t> lying_in(Map& self, uint64_t segment,
                                                                            uint32_t from,
                                                                            uint32_t most_slots,
                                                                            uint64_t most_bytes) {
  Evacuation found =
      self.batch([&](ObjectMap& map) { return map.lying_in(segment, from, most_slots, most_bytes); });
  Refs refs;
  for (const Ref& ref : found.todo) refs.emplace_back(ref.at, ref.version);
  return {std::move(refs), found.next, found.leased, found.arriving, found.reserved, found.copying};
}

std::span<const uint32_t> given_out(Map& self, const nb::bytes& slots) {
  auto given = as_span<uint32_t>(slots, "slots");
  for (uint32_t at : given) {
    require(self.core().is_leased(at) || self.core().is_reserved(at),
            "a slot has no lease and is not reserved");
  }
  return given;
}

bool lies_in(Map& self, const nb::bytes& slots, uint64_t segment) {
  return self.core().lies_in(given_out(self, slots), segment);
}

std::vector<uint64_t> segments_of(Map& self, const nb::bytes& slots) {
  return self.core().segments_of(given_out(self, slots));
}

nb::bytes digests_of(Map& self, const nb::bytes& slots) {
  std::vector<Digest> digests;
  for (uint32_t at : given_out(self, slots)) digests.push_back(self.core().digest_at(at));
  return packed(digests);
}

void init_options(PutOptions* self, uint32_t writer, uint64_t node, uint16_t tenant, uint8_t priority,
                  uint8_t replicas, bool replace, bool hard_pin, double soft_until_s, bool same_node,
                  std::vector<uint64_t> preferred, std::vector<uint64_t> avoid, double now_s,
                  uint8_t stripes) {
  require(priority < 16, "priority must be below 16");
  require(replicas != 0, "there must be at least one replica");
  require(stripes != 0, "there must be at least one stripe");
  new (self) PutOptions{.wish = {writer, node, same_node, std::move(preferred), stripes},
                        .tenant = tenant,
                        .priority = priority,
                        .replicas = replicas,
                        .replace = replace,
                        .hard_pin = hard_pin,
                        .soft_until_s = soft_until_s,
                        .group = {},
                        .session = {},
                        .avoid = std::move(avoid),
                        .now_s = now_s};
}

void bind_options(nb::module_& m) {
  nb::class_<PutOptions>(m, "PutOptions", "How and where the values of one batch are put.")
      .def("__init__", &init_options, "writer"_a, "node"_a = 0, "tenant"_a = 0, "priority"_a = 0,
           "replicas"_a = 1, "replace"_a = false, "hard_pin"_a = false, "soft_until_s"_a = 0.0,
           "same_node"_a = false, "preferred"_a = std::vector<uint64_t>(),
           "avoid"_a = std::vector<uint64_t>(), "now_s"_a = 0.0, "stripes"_a = 1,
           "writer: number of a member. preferred, avoid: ids of segments. Raises ValueError for a priority\n"
           "over 15, and no replicas or stripes.")
      .def_rw("group", &PutOptions::group)
      .def_rw("session", &PutOptions::session);
}

void bind_members(nb::class_<Map>& map) {
  map.def(
         "add_member", [](Map& self, uint32_t member) { self.core().add_member(member); }, "member"_a,
         "Keep records for a member from now on.")
      .def(
          "drop_member", [](Map& self, uint32_t member) { self.core().drop_member(member); }, "member"_a)
      .def("add_segment", &add_segment, "id"_a, "owner"_a, "node"_a, "nbytes"_a, "confirms"_a,
           "Take in an empty segment of a member. confirms: room of what has gone is used again only when\n"
           "its owner has confirmed the record of that. Raises ValueError.")
      .def(
          "drop_segment", [](Map& self, uint64_t id) { self.core().drop_segment(id); }, "id"_a,
          "Forget a segment; what has no whole replica elsewhere is gone at once.")
      .def(
          "open_segment", [](Map& self, uint64_t id, bool open) { self.core().open_segment(id, open); },
          "id"_a, "open"_a, "Whether the segment takes new values.")
      .def("adopt", &adopt, "segment"_a, "frames"_a, "now_s"_a,
           "Take in what its owner's ledger says of a segment that has just been added: how many objects "
           "were\n"
           "adopted, wait for another owner's word, and were refused, which their owner is told. Raises\n"
           "ValueError.")
      .def(
          "end_adoption", [](Map& self) { self.core().end_adoption(); },
          "Refuse what still waits for another owner's word.")
      .def(
          "await_ledgers", [](Map& self) { self.core().await_ledgers(); },
          "From now on what leaves does not come back by a ledger that tells of it, or of an older version.")
      .def(
          "end_ledgers", [](Map& self) { self.core().end_ledgers(); }, "Remember no more what has left.")
      .def(
          "start_above", [](Map& self, uint64_t version) { self.core().start_above(version); }, "version"_a,
          "Versions to come are above this one.")
      .def("records", &records, "member"_a, "most_bytes"_a,
           "What the member has not confirmed: pages of the number of their first frame, and the frames.")
      .def(
          "unread",
          [](Map& self, uint32_t member) -> uint64_t {
            RecordStream* stream = self.core().stream(member);
            return stream == nullptr ? 0 : stream->unread();
          },
          "member"_a, "How many records the member has not confirmed.")
      .def(
          "take_rings", [](Map& self) { return self.core().take_rings(); },
          "Members to be told now that records wait for them, each once until it has been handed them.")
      .def(
          "confirm", [](Map& self, uint32_t member, uint64_t seen) { self.core().confirm(member, seen); },
          "member"_a, "seen"_a, "The member has all records up to this number.")
      .def("segment_room", &segment_room, "id"_a,
           "Bytes of one segment: capacity, free, largest hole, evictable, leased, reserved, kept, "
           "retiring,\n"
           "and what the values in what is taken have. Raises KeyError.")
      .def("room", &room, "Capacity, free, evictable, leased, reserved, kept and retiring bytes.")
      .def_prop_ro("segments", [](Map& self) { return self.core().segments().size(); });
}

void bind_sums(nb::class_<Map>& map) {
  map.def("set_sums", &set_sums, "slots"_a, "sums"_a,
          "What the checksums (uint64) of the values of reserved slots are. Raises ValueError.")
      .def("sums", &sums_of, "slots"_a, "Checksums (uint64), 0 for those not known. Raises ValueError.")
      .def("condemn", &condemn, "at"_a, "segment"_a,
           "What a leased slot has in this segment is not what was put: the replica leaves, or the object "
           "does\n"
           "with its last. False when it was not there any more. Raises ValueError.");
}

void bind_objects(nb::class_<Map>& map) {
  map.def("exist", &exist, "digests"_a, "One byte per digest, 0 or 1.")
      .def("sizes", &sizes, "digests"_a, "uint64 each; 2**64 - 1 for what is not there.")
      .def("own", &own, "digests"_a, "tenant"_a,
           "The digests, but zeros in place of those whose objects are another tenant's.")
      .def("locate", &locate, "digests"_a, "reader"_a, "node"_a,
           "Begin a lease of each that is there, as a use. Found (one byte each), sizes (uint64 each), slots "
           "of\n"
           "those found (uint32), rows (see protocol.Placement) of the nearest replica of each and then of\n"
           "those further away, and the ids of the segments in the rows.")
      .def("release", &release, "slots"_a, "End a lease of each; the positions of those that are broken.")
      .def("reserve", &reserve, "digests"_a, "sizes"_a, "put"_a,
           "Find or make room. Outcomes (one byte each), slots of those placed (uint32), rows, ids of the\n"
           "segments in them, and whether waiting may help those that are full.")
      .def("commit", &commit, "slots"_a, "failed"_a, "keys"_a, "replace"_a, "now_s"_a,
           nb::sig("def commit(self, slots: bytes, failed: collections.abc.Sequence[int], keys: list[bytes], "
                   "replace: bool, now_s: float) -> bytes"),
           "Make reserved slots findable. Outcomes, one byte each; those at the positions `failed` stay\n"
           "reserved. Raises ValueError for slots that are not reserved.")
      .def("abandon", &abandon, "slots"_a,
           "Give back reserved room, to which nobody writes any more. Raises ValueError.")
      .def("remove", &remove, "digests"_a, "Hide what is there. One byte per digest, 0 or 1.")
      .def(
          "remove_tenant", [](Map& self, uint16_t tenant) { return self.core().remove_tenant(tenant); },
          "tenant"_a, "Hide all that a tenant has; how many that was.")
      .def("pin", &pin, "digests"_a, "hard"_a, "soft_until_s"_a, "now_s"_a,
           "Pin what is there, for good or until a time. One byte per digest, 0 or 1.")
      .def("unpin", &unpin, "digests"_a, "One byte per digest, 0 or 1.")
      .def(
          "end_session",
          [](Map& self, uint16_t tenant, std::string_view session) {
            return self.core().end_session(tenant, session);
          },
          "tenant"_a, "session"_a, "Let the session's objects go first; how many there are.")
      .def(
          "expire_pins", [](Map& self, double now_s) { self.core().expire_pins(now_s); }, "now_s"_a)
      .def(
          "tenant", [](Map& self, std::string_view name) { return self.core().tenant(name); }, "name"_a,
          "Number of a tenant.")
      .def(
          "limit_tenant",
          [](Map& self, uint16_t tenant, uint64_t quota_bytes, bool evicts_own) {
            self.core().limit_tenant(tenant, quota_bytes, evicts_own);
          },
          "tenant"_a, "quota_bytes"_a, "evicts_own"_a)
      .def(
          "tenants",
          [](Map& self) {
            std::vector<std::tuple<std::string, uint64_t, uint64_t>> rooms;
            for (auto& room : self.core().tenants()) rooms.emplace_back(room.name, room.used, room.quota);
            return rooms;
          },
          "Name, bytes taken and quota (0: none) of each tenant.")
      .def(
          "tenant_bytes", [](Map& self, uint16_t tenant) { return self.core().tenant_bytes(tenant); },
          "tenant"_a, "What the tenant's values take, with all replicas.")
      .def("__len__", [](Map& self) { return self.core().size(); })
      .def(
          "counts",
          [](Map& self) {
            const Counts& counts = self.core().counts();
            return std::tuple(counts.stored, counts.evicted, counts.removed, counts.lost);
          },
          "Stored, evicted, removed and lost objects.")
      .def("describe", &describe,
           "Everything, for tests: version, digest, bytes, state, leases, whether it is broken, level of\n"
           "eviction, and extents (segment, offset, bytes, replica) in segments that are there.");
}

void bind_copies(nb::class_<Map>& map) {
  map.def("copy_begin", &copy_begin, "at"_a, "version"_a, "mover"_a, "target"_a = 0, "leaving"_a = 0,
          "evicts"_a = false, "bounded"_a = false, "avoid"_a = nb::make_tuple(),
          "Begin one more replica: outcome (see protocol.CopyOutcome), slot of its room, bytes, rows of the\n"
          "source and of the room, and ids of the segments in them. target, leaving: ids of segments, or 0;\n"
          "avoid: of those that take it when no other may. Raises ValueError.")
      .def("copy_end", &copy_end, "slot"_a, "key"_a, "now_s"_a,
           "All bytes are in the room, and nobody writes there any more: what became of the copy. Raises\n"
           "ValueError.")
      .def(
          "copy_give_up", [](Map& self, uint32_t slot) { self.core().copy_give_up(slot); }, "slot"_a,
          "Nobody reads the source for this copy any more; its room is taken until it is abandoned.")
      .def("want", &want, "digests"_a, "replicas"_a,
           "So many replicas are wanted from now on; those beyond leave. One byte per digest, 0 or 1.")
      .def(
          "take_mending", &take_mending, "most"_a,
          "Slot and version of objects with fewer replicas than wanted, and the number of who may make one;\n"
          "each once until mended().")
      .def(
          "mended",
          [](Map& self, uint32_t at, uint64_t version) {
            require(self.core().is_slot(at), "there is no such slot");
            self.core().mended({at, version});
          },
          "at"_a, "version"_a, "Something was tried; if it was not enough, it is to be tried again.")
      .def_prop_ro("to_mend", [](Map& self) { return self.core().to_mend(); })
      .def_prop_ro("corrupt", [](Map& self) { return self.core().counts().corrupt; })
      .def_prop_ro("copied", [](Map& self) { return self.core().counts().copied; })
      .def("whereabouts", &whereabouts, "digests"_a,
           "Of each digest its slot (2**32 - 1: not there), version, number of an owner, how many whole\n"
           "replicas it has, and ids of the segments they lie in.")
      .def("lying_in", &lying_in, "segment"_a, "start"_a, "most_slots"_a, "most_bytes"_a,
           "Go through what lies in a segment that is to become empty: slots and versions of what has to be\n"
           "copied elsewhere, where to go on (2**32 - 1: this was all), and how many are copied but still\n"
           "read here, copied but not known to their owners yet, being put here, being copied now. What is\n"
           "elsewhere, too, leaves.")
      .def(
          "relinquish",
          [](Map& self, uint32_t at, uint64_t version, uint64_t segment) {
            require(self.core().is_slot(at), "there is no such slot");
            return self.core().relinquish({at, version}, segment);
          },
          "at"_a, "version"_a, "segment"_a,
          "Let an object leave a segment if a replica of it stays elsewhere; whether that is so.")
      .def("lies_in", &lies_in, "slots"_a, "segment"_a,
           "Whether one of these leased or reserved slots has bytes there. Raises ValueError.")
      .def("digests_of", &digests_of, "slots"_a,
           "What these leased or reserved slots are for. Raises ValueError.")
      .def("segments_of", &segments_of, "slots"_a,
           "In which segments these leased or reserved slots have bytes. Raises ValueError.");
}

}  // namespace

Map::Map(uint64_t granule_bytes, double evict_reserve_fraction, const nb::object& eviction,
         uint64_t first_version)
    : compiled_(nb::isinstance<nb::str>(eviction)),
      map_(granule_bytes, evict_reserve_fraction, kind_of(eviction), maker_of(eviction), first_version) {
  if (granule_bytes == 0 || (granule_bytes & (granule_bytes - 1)) != 0) {
    throw nb::value_error("granule_bytes must be a power of two");
  }
}

void bind_map(nb::module_& m) {
  bind_options(m);
  nb::class_<Map> map(
      m, "ObjectMap",
      "Objects, the segments they lie in and the order in which they leave. Not thread-safe.");
  map.def(nb::init<uint64_t, double, const nb::object&, uint64_t>(), "granule_bytes"_a,
          "evict_reserve_fraction"_a, "eviction"_a, "first_version"_a = 1,
          "eviction: name of a policy of this package, or what makes an EvictionPolicy. Raises ValueError.");
  map.def_prop_ro("compiled", &Map::compiled, "Whether the order of eviction is kept without Python.");
  bind_members(map);
  bind_objects(map);
  bind_sums(map);
  bind_copies(map);
}

}  // namespace mooncake::store
