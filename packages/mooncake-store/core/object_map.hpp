// Objects, the segments they lie in and the order in which they leave, kept consistent with each other. One
// call handles a batch. Knows neither connections nor deadlines of leases; times are the caller's, in
// seconds. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <queue>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "batches.hpp"
#include "copies.hpp"
#include "crowds.hpp"
#include "departed.hpp"
#include "order.hpp"
#include "records.hpp"
#include "segments.hpp"
#include "slots.hpp"
#include "sums.hpp"

namespace mooncake::store {

class ObjectMap {
 public:
  ObjectMap(uint64_t granule_bytes, double evict_reserve, Orders::Kind kind, Orders::Make make,
            uint64_t first_version);
  ObjectMap(const ObjectMap&) = delete;

  // Members are numbers that are never used again. Records for one are kept between these two calls.
  // Numbers of records begin above all of earlier members, so that what confirms those confirms none of
  // these.
  void add_member(uint32_t member) { streams_.try_emplace(member, uint64_t{member} << 32); }
  void drop_member(uint32_t member);
  // See Segments::add.
  bool add_segment(uint64_t id, uint32_t owner, uint64_t node, uint64_t nbytes, bool confirms);
  // What has no whole replica elsewhere is gone at once, for those who read it now, too.
  void drop_segment(uint64_t id);
  void open_segment(uint64_t id, bool open);
  // Takes in what an owner's ledger says of a segment that has just been added: frames, one after the other.
  // Of two versions of a key the higher one stands; what is refused is gone for its owner. What needs another
  // owner's word, too, waits for that until end_adoption(). False for bytes that are no frames.
  bool adopt(uint64_t segment, std::string_view frames, double now_s, Adoption& adoption);
  void end_adoption();
  // From now on, until the end of this: what is removed, replaced or evicted does not come back by a ledger
  // that tells of it, or of an older version.
  void await_ledgers() { departed_.await(); }
  void end_ledgers() { departed_.end(); }
  // Versions to come are above this one.
  void start_above(uint64_t version) { next_version_ = std::max(next_version_, version + 1); }

  std::vector<uint8_t> exist(std::span<const Digest> digests) const;
  // Bytes of each; kMissing for what is not there.
  static constexpr uint64_t kMissing = ~0ull;
  std::vector<uint64_t> sizes(std::span<const Digest> digests) const;
  // The digests, but zeros in place of those whose objects are another tenant's: they are not there for it.
  std::vector<Digest> own(std::span<const Digest> digests, uint16_t tenant) const;
  // Counts as a use, tail first, and begins a lease of each.
  Located locate(std::span<const Digest> digests, uint32_t reader, uint64_t node);
  // Ends a lease of each, tail first; the positions of those that are broken.
  std::vector<uint32_t> release(std::span<const uint32_t> slots);
  Reserved reserve(std::span<const Digest> digests, std::span<const uint64_t> sizes, const PutOptions& put);
  // Makes reserved slots findable. Those of which `failed` says 1 stay reserved.
  std::vector<Outcome> commit(std::span<const uint32_t> slots, std::span<const uint8_t> failed,
                              std::span<const std::string_view> keys, bool replace, double now_s);
  // What their values' checksums are (sums.hpp): of reserved slots, before they are committed.
  void set_sums(std::span<const uint32_t> slots, std::span<const uint64_t> sums);
  uint64_t sum_at(uint32_t at) const { return sums_[at]; }
  // The replica of a leased slot that has bytes in this segment is not what was put: it leaves, or the object
  // does with its last. False when it was not there any more.
  bool condemn(uint32_t at, uint64_t segment);
  // Gives back the room of reserved slots. Nobody may write to it any more.
  void abandon(std::span<const uint32_t> slots);
  std::vector<uint8_t> remove(std::span<const Digest> digests);
  // Remove everything a tenant has; how many that was.
  uint64_t remove_tenant(uint16_t tenant);

  // Begins one more replica of an object: its source is leased, and has room, from now until the copy ends.
  CopyBegun copy_begin(const Ref& ref, const CopyWish& wish);
  // All bytes are there, and nobody writes to the room any more. The new replica is one of the object's from
  // now on if that is still the same version, else its room is free. Whoever asks knows the key's text.
  Copied copy_end(uint32_t at, std::string_view key, double now_s);
  // Nobody reads the source for the copy any more. Its room stays taken until it is abandoned.
  void copy_give_up(uint32_t at);
  // So many replicas are wanted from now on; those beyond leave. Of every key whether it is there.
  std::vector<uint8_t> want(std::span<const Digest> digests, uint8_t replicas);
  // Objects that have fewer replicas than wanted, each once until mended() says that something was tried.
  std::vector<Mending> take_mending(size_t most);
  void mended(const Ref& ref);
  size_t to_mend() const { return to_mend_.size(); }
  std::vector<Whereabouts> whereabouts(std::span<const Digest> digests) const;
  // Goes through the slots from `from` on, so many at a time, and lets leave what is elsewhere, too.
  Evacuation lying_in(uint64_t segment, uint32_t from, uint32_t most_slots, uint64_t most_bytes);
  // Lets what lies there leave if a replica of it stays elsewhere; whether that is so.
  bool relinquish(const Ref& ref, uint64_t segment);
  // Whether one of these slots, leased or reserved, has bytes there.
  bool lies_in(std::span<const uint32_t> slots, uint64_t segment) const;
  // In which segments they have bytes, each once.
  std::vector<uint64_t> segments_of(std::span<const uint32_t> slots) const;

  // Each says of every key whether it is there.
  std::vector<uint8_t> pin(std::span<const Digest> digests, bool hard, double soft_until_s, double now_s);
  std::vector<uint8_t> unpin(std::span<const Digest> digests);
  // The session's objects are the first to go; how many there are.
  uint64_t end_session(uint16_t tenant, std::string_view session);
  void expire_pins(double now_s);
  // The number of a tenant, from its name.
  // At most 65535 of them; the next ones share the last number.
  uint16_t tenant(std::string_view name);
  void limit_tenant(uint16_t tenant, uint64_t quota_bytes, bool evicts_own);
  struct TenantRoom {
    std::string name;
    uint64_t used, quota;  // bytes; no quota: 0
  };
  std::vector<TenantRoom> tenants() const;
  uint64_t tenant_bytes(uint16_t tenant) const { return tenants_[tenant].used; }

  // Null for a member that is not there.
  RecordStream* stream(uint32_t member);
  void confirm(uint32_t member, uint64_t seen);
  // Members to be told now that records wait for them, each once until it has read them.
  std::vector<uint32_t> take_rings();
  bool may_ring() const { return !to_ring_.empty(); }

  size_t size() const { return index_.size(); }
  const Counts& counts() const { return counts_; }
  const Segments& segments() const { return segments_; }
  uint64_t next_version() const { return next_version_; }
  uint64_t version_at(uint32_t at) const { return slots_[at].version; }
  const Digest& digest_at(uint32_t at) const { return slots_[at].digest; }
  bool is_slot(uint32_t at) const { return at < slots_.end(); }
  bool is_reserved(uint32_t at) const { return at < slots_.end() && slots_[at].state == State::kReserved; }
  bool is_leased(uint32_t at) const {
    return at < slots_.end() && slots_[at].state != State::kFree && slots_[at].leases != 0;
  }
  // For tests.
  template <typename F>
  void for_each(F&& visit) const {
    for (uint32_t at = 0; at < slots_.end(); ++at) {
      if (slots_[at].state != State::kFree) visit(slots_[at], extents(at));
    }
  }
  Use use_of(const Slot& slot) const;

 private:
  // What few objects have.
  struct Extra {
    std::vector<Extent> extents;  // all of them, if there are any; then the slot has none
    uint32_t group = 0, session = 0;
    double soft_until_s = 0;
    uint32_t next = 0;      // free one
    uint32_t arriving = 0;  // replicas of which their owners do not know yet; until then none leaves
    uint8_t replicas = 1;   // wanted
    bool mending = false;   // somebody is at making one of those that are missing
  };
  struct Tenant {
    std::string name;
    uint64_t used = 0, quota = 0;  // bytes; no quota: 0
    bool evicts_own = false;
  };
  struct Pin {
    double until_s;
    Ref ref;
    bool operator>(const Pin& other) const { return until_s > other.until_s; }
  };
  // A record of which some extents are vouched for, one bit each, but of no whole replica.
  struct Waiting {
    std::string frame;
    uint64_t vouched = 0;
  };
  struct Arrival {
    uint64_t number;  // of the stream: its owner knows of it when it is confirmed
    Ref ref;
  };
  struct Retired {
    uint64_t number;  // of the stream: free when it is confirmed
    Extent extent;
  };

  void adopt_one(uint16_t number, const RecordView& record, double now_s, Adoption& adoption);
  bool is_adopted(uint16_t number, const RecordView& record) const;
  uint64_t vouched_before(const RecordView& record, uint64_t* refused) const;
  uint64_t take_vouched(uint16_t number, const RecordView& record);
  Extent extent_of(uint16_t number, const RecordExtent& extent) const;
  uint64_t take_whole(const RecordView& record, uint64_t vouched, std::vector<Extent>& whole) const;
  bool may_adopt(uint16_t tenant, uint32_t before, std::span<const Extent> coming);
  void add_adopted(const RecordView& record, std::vector<Extent> extents, double now_s);
  void add_replicas(uint32_t at, std::vector<Extent> all);
  void give_back_vouched(const RecordView& record, uint64_t vouched);
  void refuse(const RecordView& record, uint64_t vouched);
  void tell_refused(uint32_t owner, const RecordView& record);
  void forget_waiting(uint64_t segment);

  std::vector<uint32_t> find(std::span<const Digest> digests) const;
  std::vector<Extent> extents(uint32_t at) const;
  template <typename F>
  void each_extent(const Slot& slot, F&& visit) const {
    if (slot.extra != 0 && !extras_[slot.extra].extents.empty()) {
      for (const Extent& extent : extras_[slot.extra].extents) visit(extent);
    } else if (slot.segment != kNoSegment) {
      visit(Extent{static_cast<uint16_t>(slot.segment), 0, slot.granule, slot.nbytes});
    }
  }
  Extra& extra(uint32_t at);
  void drop_extra(uint32_t at);
  void set_extents(uint32_t at, const std::vector<Extent>& extents);
  void book(uint32_t at, int sign);
  bool is_whole(const std::vector<Extent>& extents, uint8_t replica) const;

  uint32_t reserve_one(const Digest& digest, uint64_t nbytes, const PutOptions& put,
                       const std::vector<uint16_t>& usable, std::vector<Extent>& found, Outcome& outcome);
  bool fits_quota(uint16_t tenant, uint64_t nbytes) const;
  // Evicts of the tenant's own where that is the rule.
  bool within_quota(uint16_t tenant, uint64_t nbytes);
  // In vain when it is the turn of `expendable` to leave, for which the room would be.
  bool make_room(uint64_t nbytes, const PutOptions& put, const std::vector<uint16_t>& usable, uint8_t replica,
                 std::vector<Extent>& found, uint32_t expendable = kNoSlot);
  std::vector<uint16_t> elsewhere(const std::vector<uint16_t>& usable,
                                  const std::vector<Extent>& extents) const;
  void evict_reserve();
  void evict(uint32_t at);
  Outcome commit_one(uint32_t at, std::string_view key, bool replace, double now_s);
  void set_level(uint32_t at, uint32_t level);
  uint32_t level_of(const Slot& slot) const { return Orders::kFirst + slot.priority; }

  void begin_lease(uint32_t at);
  void end_lease(uint32_t at);
  void hide(uint32_t at, uint32_t successor);
  void free(uint32_t at);
  void free_extent(const Extent& extent, uint64_t tenant, bool was_known);
  void let_go(const Extent& extent, bool was_known);
  void lose(uint32_t at);
  void prune(uint32_t at);
  void add_rows(Rows& rows, uint64_t position, const std::vector<Extent>& extents, int replica) const;
  void locate_one(uint32_t at, uint64_t position, uint32_t reader, uint64_t node, Located& located);

  std::vector<Extent> staying(uint32_t at, uint64_t leaving) const;
  uint8_t source_of(const std::vector<Extent>& all, uint32_t mover) const;
  std::vector<uint16_t> places_for_copy(uint32_t at, const CopyWish& wish) const;
  Copied may_copy(const Ref& ref, const CopyWish& wish) const;
  Copied room_for_copy(const Ref& ref, const CopyWish& wish, std::vector<Extent>& found);
  Copied may_join(uint32_t at, const Copy& copy) const;
  void join(uint32_t at, const Copy& copy, std::string_view key, double now_s);
  void arrived(const Ref& ref);
  void let_leave(uint32_t at, uint64_t segment);
  size_t kept_elsewhere(uint32_t at, uint64_t leaving) const;
  uint8_t wanted_replicas(uint32_t at) const {
    return slots_[at].extra == 0 ? uint8_t{1} : extras_[slots_[at].extra].replicas;
  }
  void mend(uint32_t at);
  uint8_t flags_of(uint32_t at) const;

  std::vector<uint32_t> concerned(uint32_t at, bool owners_only) const;
  void tell_stored(uint32_t at, std::string_view key, double now_s);
  void tell_gone(uint32_t at, uint32_t successor);
  void tell_changed(uint32_t at);
  void send(uint32_t member, std::string_view frame);

  Slots slots_;
  ValueSums sums_;
  Index index_{slots_};
  Orders orders_;
  Segments segments_;
  std::vector<Extra> extras_{1};
  uint32_t free_extra_ = 0;
  std::vector<Tenant> tenants_;
  std::unordered_map<std::string, uint16_t> tenant_numbers_;
  Crowds groups_{slots_}, sessions_{slots_};
  std::priority_queue<Pin, std::vector<Pin>, std::greater<>> pins_;
  std::unordered_map<uint32_t, RecordStream> streams_;
  std::unordered_map<uint32_t, std::deque<Retired>> retired_;  // by owner
  std::unordered_map<uint64_t, Waiting> waiting_;              // by version
  Departed departed_;
  std::unordered_map<uint32_t, std::deque<Arrival>> arrivals_;  // by owner
  std::unordered_map<uint32_t, Copy> copies_;                   // by the slot of their room
  std::unordered_set<uint32_t> copying_;                        // slots that are copied now
  std::deque<Ref> to_mend_;
  std::vector<uint32_t> to_ring_;
  std::vector<Extent> found_;  // used again by each put, as the next two
  std::vector<RecordExtent> record_extents_;
  std::string record_frame_;
  uint64_t next_version_;
  const double evict_reserve_;
  uint64_t awaited_bytes_ = 0;  // of keys of the batch that is being reserved: evicted for, and yet to come
  Counts counts_;
};

}  // namespace mooncake::store
