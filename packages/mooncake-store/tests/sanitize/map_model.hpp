// Random steps of the object map, with what must hold after each: no granule is in two extents, every granule
// of an object has its bytes, leases are counted, replicas have different owners, what is found is what was
// committed, and a ledger takes every record.
#pragma once

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "copy_steps.hpp"
#include "ledger.hpp"
#include "object_map.hpp"

namespace mooncake::store {

class MapModel {
 public:
  // `recovers`: another map takes over now and then, from the ledgers.
  explicit MapModel(Orders::Kind kind, Orders::Make make, bool recovers = false)
      : kind_(kind), make_(std::move(make)), recovers_(recovers) {
    start(1);
    for (uint32_t member = 1; member <= kMembers; ++member) add_segment(member);
  }

  void step(std::mt19937_64& random) {
    now_s_ += 0.01;
    if (recovers_ && random() % 64 == 0) return fail_over(random);
    switch (random() % 14) {
      case 0:
      case 1:
        reserve(random);
        break;
      case 2:
      case 3:
        commit(random);
        break;
      case 4:
      case 5:
        locate(random);
        break;
      case 6:
        release(random);
        break;
      case 7:
        keep(random);
        break;
      case 8:
        read_records(1 + random() % kMembers);
        break;
      case 9:
      case 10:
        copies_.begin_some(*map_, some(random), segments_, random);
        break;
      case 11:
        copies_.end_one(*map_, now_s_, random);
        break;
      case 12:
        copies_.mend(*map_, some(random), random);
        break;
      default:
        leave(random);
    }
    check();
  }

 private:
  static constexpr uint64_t kGranule = 4096;
  static constexpr uint32_t kMembers = 3;

  struct Lease {
    uint32_t slot;
    uint64_t version;
    Rows rows;
  };

  static Digest digest(uint64_t number) { return {number * 0x9E3779B97F4A7C15u, number}; }

  std::vector<Digest> some(std::mt19937_64& random) {
    std::vector<Digest> digests;
    for (uint64_t i = 1 + random() % 4; i-- != 0;) digests.push_back(digest(random() % 40));
    return digests;
  }

  void start(uint64_t first_version) {
    map_.emplace(kGranule, 0.05, kind_, make_, first_version);
    for (uint32_t member = 1; member <= kMembers; ++member) map_->add_member(member);
  }

  // Owners come to the next map with what they know; nobody who wrote at the last one writes any more.
  void fail_over(std::mt19937_64& random) {
    std::vector<Digest> expected;
    map_->for_each([&](const Slot& slot, const std::vector<Extent>& extents) {
      bool known = slot.state == State::kCommitted && !extents.empty() && known_.count(slot.version) != 0;
      if (known) expected.push_back(slot.digest);
    });
    start(map_->next_version());
    reserved_.clear(), leased_.clear(), copies_.clear();
    waits_ = true;  // for the word of other owners
    std::shuffle(segments_.begin(), segments_.end(), random);
    for (auto [id, member] : segments_) {
      if (random() % 4 == 0) check();
      require(map_->add_segment(id, member, member % 2, 24 * kGranule, true), "a segment is taken in");
      Adoption adoption;
      for (uint64_t part = 0; auto frames = ledgers_[member].part(part); ++part) {
        require(map_->adopt(id, *frames, now_s_, adoption), "a ledger can be read");
      }
      ledgers_[member].restart(true);
    }
    if (random() % 4 != 0) map_->end_adoption(), waits_ = false;
    for (uint8_t there : map_->exist(expected)) {
      require(there, "a key of what owners knew is found after a failover");
    }
    check();
  }

  void add_segment(uint32_t member) {
    uint64_t id = ++last_segment_;
    require(map_->add_segment(id, member, member % 2, 24 * kGranule, recovers_ || member == 2),
            "a segment is taken in");
    require(!map_->add_segment(id, member, 0, kGranule, false), "and not twice");
    segments_.push_back({id, member});
  }

  void reserve(std::mt19937_64& random) {
    std::vector<Digest> digests = some(random);
    std::vector<uint64_t> sizes(digests.size(), random() % (9 * kGranule));
    PutOptions put;
    put.wish.writer = 1 + random() % kMembers;
    put.priority = random() % 3;
    put.replicas = 1 + random() % 3;
    put.replace = random() % 2 == 0;
    put.hard_pin = random() % 16 == 0;
    put.soft_until_s = random() % 8 == 0 ? now_s_ + 0.3 : 0;
    if (random() % 4 == 0) put.group = "g" + std::to_string(random() % 3);
    if (random() % 4 == 0) put.session = "s";
    put.now_s = now_s_;
    uint64_t first = map_->next_version();
    Reserved reserved = map_->reserve(digests, sizes, put);
    reserved_.insert(reserved_.end(), reserved.slots.begin(), reserved.slots.end());
    map_->for_each([&](const Slot& slot, const std::vector<Extent>& extents) {
      if (slot.version >= first) memory_.write(map_->segments(), extents, slot.version);
    });
  }

  void commit(std::mt19937_64& random) {
    if (reserved_.empty()) return;
    size_t count = 1 + random() % std::min<size_t>(3, reserved_.size());
    std::vector<uint32_t> slots(reserved_.end() - count, reserved_.end());
    reserved_.resize(reserved_.size() - count);
    if (random() % 5 == 0) {
      map_->abandon(slots);
      return;
    }
    std::vector<uint8_t> failed(count, 0);
    failed[0] = random() % 5 == 0;
    std::vector<std::string_view> keys(count, "a key");
    auto outcomes = map_->commit(slots, failed, keys, random() % 2 == 0, now_s_);
    require(outcomes.size() == count, "every slot has an outcome");
    if (failed[0]) reserved_.push_back(slots[0]);
  }

  void locate(std::mt19937_64& random) {
    std::vector<Digest> digests = some(random);
    auto there = map_->exist(digests);
    Located located = map_->locate(digests, 1 + random() % kMembers, 1);
    require(located.found == there, "what is there is found");
    std::map<uint64_t, Rows> rows;  // by position
    for (size_t i = 0; i < located.replicas[0].size(); i += 5) {
      Rows& own = rows[located.replicas[0][i]];
      own.insert(own.end(), &located.replicas[0][i], &located.replicas[0][i] + 5);
    }
    for (size_t i = 0, slot = 0; i < digests.size(); ++i) {
      if (!located.found[i]) continue;
      uint32_t at = located.slots[slot++];
      leased_.push_back({at, map_->version_at(at), rows[i]});
    }
  }

  void release(std::mt19937_64& random) {
    if (leased_.empty()) return;
    std::swap(leased_[random() % leased_.size()], leased_.back());
    Lease lease = leased_.back();
    leased_.pop_back();
    std::vector<uint32_t> one{lease.slot};
    require(map_->is_leased(one[0]), "a leased slot stays");
    bool good = map_->release(one).empty();
    require(!good || memory_.have(lease.rows, lease.version), "what was located stays until it is released");
  }

  void keep(std::mt19937_64& random) {
    std::vector<Digest> digests = some(random);
    if (random() % 3 == 0) {
      map_->unpin(digests);
    } else {
      map_->pin(digests, random() % 8 == 0, now_s_ + 0.2, now_s_);
    }
    if (random() % 8 == 0) map_->end_session(0, "s");
    if (random() % 4 == 0) map_->unpin(digests);
  }

  void leave(std::mt19937_64& random) {
    if (random() % 4 != 0) {
      map_->remove(some(random));
      return;
    }
    auto [id, member] = segments_[random() % segments_.size()];
    map_->for_each([&](const Slot& slot, const std::vector<Extent>& extents) {
      for (const Extent& extent : extents) {
        if (map_->segments()[extent.segment].id == id) known_.erase(slot.version);
      }
    });
    map_->drop_segment(id);
    std::erase_if(segments_, [id = id](const auto& segment) { return segment.first == id; });
    add_segment(member);
  }

  void read_records(uint32_t member) {
    std::vector<Ledger::Departed> departed;
    do {  // what is confirmed lets replicas leave elsewhere, which is told, too
      for (const RecordPage* page : map_->stream(member)->read(1u << 20)) {
        require(ledgers_[member].take(page->first, page->frames, departed), "a ledger takes every record");
      }
      map_->confirm(member, ledgers_[member].seen());
    } while (map_->stream(member)->unread() != 0);
    map_->for_each([&](const Slot& slot, const std::vector<Extent>& extents) {
      bool known = slot.state == State::kCommitted;
      for (const Extent& extent : extents) {
        const Segment& segment = map_->segments()[extent.segment];
        known &= segment.there && knows(ledgers_[segment.owner], slot.version, segment.id, extent.granule);
      }
      if (known) known_.insert(slot.version);
    });
  }

  static bool knows(const Ledger& ledger, uint64_t version, uint64_t segment, uint64_t granule) {
    auto frame = ledger.find(version);
    if (!frame) return false;
    std::string_view bytes = *frame;
    RecordView record;
    require(take_record(bytes, record), "a ledger has whole records");
    return std::any_of(record.extents.begin(), record.extents.end(), [&](const RecordExtent& extent) {
      return extent.segment == segment && extent.offset == granule * kGranule;
    });
  }

  void check() {
    uint64_t leases = 0, reserved = 0, found = 0;
    std::set<std::pair<uint64_t, uint64_t>> taken;
    map_->for_each([&](const Slot& slot, const std::vector<Extent>& extents) {
      leases += slot.leases;
      reserved += slot.state == State::kReserved;
      found += slot.state == State::kCommitted;
      require(slot.state != State::kHidden || slot.leases != 0, "what is hidden is being read");
      for (const Extent& extent : extents) {
        const Segment& segment = map_->segments()[extent.segment];
        if (!segment.there) continue;
        uint64_t size = map_->segments().taken(extent.nbytes) / kGranule;
        for (uint64_t i = 0; i < size; ++i) {
          require(taken.insert({segment.id, extent.granule + i}).second, "no granule is in two extents");
          bool right = slot.state == State::kReserved || slot.broken ||
                       memory_.at(segment.id, extent.granule + i) == slot.version;
          require(right, "every granule of an object has its bytes");
        }
      }
      if (slot.state == State::kCommitted) check_replicas(map_->segments(), extents);
    });
    require(leases == leased_.size() + copies_.reading(), "leases are counted");
    require(reserved == reserved_.size() + copies_.size(), "reservations are counted");
    require(found == map_->size(), "what is committed is found");
    const Segments& all = map_->segments();
    uint64_t free = all.free_bytes() + all.used_bytes(Use::kRetiring);
    uint64_t known = free + taken.size() * kGranule;
    require(waits_ ? known <= all.capacity_bytes() : known == all.capacity_bytes(), "every byte is booked");
  }

  const Orders::Kind kind_;
  const Orders::Make make_;
  const bool recovers_;
  bool waits_ = false;
  std::optional<ObjectMap> map_;
  std::map<uint32_t, Ledger> ledgers_;
  Stamps memory_;
  CopySteps copies_{memory_};
  std::vector<std::pair<uint64_t, uint32_t>> segments_;
  std::vector<uint32_t> reserved_;
  std::vector<Lease> leased_;
  std::set<uint64_t> known_;  // versions that all their owners knew
  uint64_t last_segment_ = 0;
  double now_s_ = 1.0;
};

}  // namespace mooncake::store
