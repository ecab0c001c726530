#include "tier_records.hpp"

#include <algorithm>
#include <cassert>

namespace mooncake::store {

TierRecords::Where TierRecords::where(uint32_t at) const {
  const TierRecord& record = records_[at];
  return {record.tier, epochs_.names[record.epoch], record.version, record.nbytes};
}

std::vector<TierRecords::Where> TierRecords::find(const Digest& digest) const {
  std::vector<Where> found;
  for (uint32_t at = index_.find(digest); at != kNoSlot; at = index_.next(at)) found.push_back(where(at));
  std::sort(found.begin(), found.end(), [](const Where& a, const Where& b) { return a.tier < b.tier; });
  return found;
}

TierRecords::Count TierRecords::count(uint64_t tier) const {
  auto found = counts_.find(static_cast<uint16_t>(tier));
  return found == counts_.end() || tier > kMaxTier ? Count{} : found->second;
}

void TierRecords::enter(const Digest& digest, const Where& where, std::optional<std::string_view> tenant,
                        uint16_t round) {
  assert(where.tier != 0 && where.tier <= kMaxTier);
  uint32_t at = records_.add();
  TierRecord& record = records_[at];
  record.digest = digest;
  record.version = where.version;
  record.nbytes = where.nbytes;
  record.epoch = epochs_.number(where.epoch);
  record.tenant = tenant ? tenants_.number(std::string(*tenant)) : 0;
  record.tier = static_cast<uint16_t>(where.tier);
  record.round = round;
  index_.insert(at);
  Count& count = counts_[record.tier];
  ++count.records;
  count.value_bytes += where.nbytes;
}

bool TierRecords::name(const Digest& digest, const Where& named, uint16_t round) {
  for (uint32_t at = index_.find(digest); at != kNoSlot; at = index_.next(at)) {
    if (where(at) != named) continue;
    records_[at].round = round;
    return true;
  }
  return false;
}

void TierRecords::drop(uint32_t at) {
  index_.erase(at);
  Count& count = counts_[records_[at].tier];
  --count.records;
  count.value_bytes -= records_[at].nbytes;
  records_.remove(at);
}

std::vector<TierRecords::Where> TierRecords::forget(const Digest& digest) {
  std::vector<Where> gone;
  for (uint32_t at = index_.find(digest); at != kNoSlot; at = index_.find(digest)) {
    gone.push_back(where(at));
    drop(at);
  }
  return gone;
}

bool TierRecords::lose(const Digest& digest, uint64_t tier, uint64_t epoch, uint64_t version) {
  for (uint32_t at = index_.find(digest); at != kNoSlot; at = index_.next(at)) {
    Where there = where(at);
    if (there.tier != tier || there.epoch != epoch || there.version != version) continue;
    drop(at);
    return true;
  }
  return false;
}

TierRecords::Purged TierRecords::purge(uint64_t tier, uint16_t round, uint32_t first, uint32_t most) {
  uint64_t gone = 0, end = std::min<uint64_t>(records_.end(), uint64_t{first} + most);
  for (uint64_t at = first; at < end; ++at) {
    const TierRecord& record = records_[static_cast<uint32_t>(at)];
    if (record.tier != tier || record.round == round) continue;
    drop(static_cast<uint32_t>(at));
    ++gone;
  }
  if (end >= records_.end()) return {gone, std::nullopt};
  return {gone, static_cast<uint32_t>(end)};
}

uint32_t TierRecords::find_in(const Digest& digest, std::span<const uint64_t> tiers) const {
  uint32_t best = kNoSlot;
  size_t best_place = tiers.size();
  for (uint32_t at = index_.find(digest); at != kNoSlot; at = index_.next(at)) {
    size_t place = std::find(tiers.begin(), tiers.end(), records_[at].tier) - tiers.begin();
    if (place < best_place) best = at, best_place = place;
  }
  return best;
}

std::vector<uint8_t> TierRecords::reachable(std::span<const Digest> digests,
                                            std::span<const uint64_t> tiers) const {
  std::vector<uint8_t> found(digests.size());
  std::transform(digests.begin(), digests.end(), found.begin(),
                 [&](const Digest& digest) { return find_in(digest, tiers) != kNoSlot; });
  return found;
}

std::vector<uint64_t> TierRecords::rows(std::span<const Digest> digests, std::span<const uint8_t> skip,
                                        std::span<const uint64_t> tiers) const {
  std::vector<uint64_t> rows;
  for (size_t i = 0; i < digests.size(); ++i) {
    uint32_t at = skip[i] != 0 ? kNoSlot : find_in(digests[i], tiers);
    if (at == kNoSlot) continue;
    Where there = where(at);
    rows.insert(rows.end(), {i, there.tier, there.epoch, there.version, there.nbytes});
  }
  return rows;
}

std::vector<Digest> TierRecords::own(std::span<const Digest> digests, std::string_view tenant) const {
  std::vector<Digest> owned(digests.begin(), digests.end());
  uint32_t number = tenants_.find(std::string(tenant));
  for (Digest& digest : owned) {
    uint32_t at = index_.find(digest);
    if (at == kNoSlot) continue;
    while (at != kNoSlot && (number == 0 || records_[at].tenant != number)) at = index_.next(at);
    if (at == kNoSlot) digest = {};
  }
  return owned;
}

std::vector<Digest> TierRecords::of_tenant(std::string_view tenant) const {
  std::vector<Digest> found;
  uint32_t number = tenants_.find(std::string(tenant));
  for (uint32_t at = 0; at < records_.end(); ++at) {
    const TierRecord& record = records_[at];
    if (record.tier != 0 && (record.tenant == 0 || record.tenant == number)) found.push_back(record.digest);
  }
  return found;
}

}  // namespace mooncake::store
