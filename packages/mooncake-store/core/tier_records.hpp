// What lies in tiers, as far as a master knows. One call handles a batch where there may be many. Not
// thread-safe.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "digest_index.hpp"

namespace mooncake::store {

// A value in a tier: which version of its key, and how large. Numbers of tiers begin at 1.
struct TierRecord {
  Digest digest;
  uint64_t version;
  uint64_t nbytes;
  uint32_t epoch;   // number of the epoch
  uint32_t tenant;  // number of its name; 0: it is not known whose it is
  uint32_t next;    // in its bucket; of a free one: the next free one
  uint16_t tier;    // 0: free
  uint16_t round;

  void set_free() { tier = 0; }
};
static_assert(sizeof(TierRecord) == 48);

class TierRecords {
 public:
  struct Where {
    uint64_t tier, epoch, version, nbytes;
    bool operator==(const Where&) const = default;
  };
  struct Count {
    uint64_t records = 0, value_bytes = 0;
  };
  static constexpr uint64_t kMaxTier = UINT16_MAX;

  TierRecords() = default;
  TierRecords(const TierRecords&) = delete;

  size_t size() const { return index_.size(); }
  // Memory that they take.
  size_t nbytes() const { return records_.nbytes() + index_.nbytes(); }
  bool has(const Digest& digest) const { return index_.find(digest) != kNoSlot; }
  // Those of a key, by number of the tier.
  std::vector<Where> find(const Digest& digest) const;
  Count count(uint64_t tier) const;

  // A record is there, and was named in this round of its tier. The tier must not have one of that key.
  void enter(const Digest& digest, const Where& where, std::optional<std::string_view> tenant,
             uint16_t round);
  // Whether exactly this one is there; from now on as one that was named in this round.
  bool name(const Digest& digest, const Where& where, uint16_t round);
  // All of a key go; what that was.
  std::vector<Where> forget(const Digest& digest);
  // One goes, of whatever size; whether it was there.
  bool lose(const Digest& digest, uint64_t tier, uint64_t epoch, uint64_t version);
  // Goes through so many places from `first` on: what is of this tier, and was not named in this round, goes.
  struct Purged {
    uint64_t gone;
    std::optional<uint32_t> next;  // where to go on; none: this was all
  };
  Purged purge(uint64_t tier, uint16_t round, uint32_t first, uint32_t most);

  // Of each key whether one of these tiers has it.
  std::vector<uint8_t> reachable(std::span<const Digest> digests, std::span<const uint64_t> tiers) const;
  // Rows of position, tier, epoch, version, bytes: for each key of which `skip` says 0, the record in the
  // first of these tiers that has one.
  std::vector<uint64_t> rows(std::span<const Digest> digests, std::span<const uint8_t> skip,
                             std::span<const uint64_t> tiers) const;
  // The digests, but zeros in place of those that are known here, and not as this tenant's.
  std::vector<Digest> own(std::span<const Digest> digests, std::string_view tenant) const;
  // Keys that are this tenant's, or may be.
  std::vector<Digest> of_tenant(std::string_view tenant) const;

 private:
  // Names by number, from 1 on. They are few, and stay.
  template <typename T>
  struct Numbered {
    std::vector<T> names{T{}};
    std::unordered_map<T, uint32_t> numbers;

    uint32_t find(const T& name) const {
      auto found = numbers.find(name);
      return found == numbers.end() ? 0 : found->second;
    }
    uint32_t number(const T& name) {
      auto [at, is_new] = numbers.try_emplace(name, static_cast<uint32_t>(names.size()));
      if (is_new) names.push_back(name);
      return at->second;
    }
  };

  Where where(uint32_t at) const;
  uint32_t find_in(const Digest& digest, std::span<const uint64_t> tiers) const;
  void drop(uint32_t at);

  Chunked<TierRecord> records_;
  DigestIndex<TierRecord> index_{records_};
  Numbered<uint64_t> epochs_;
  Numbered<std::string> tenants_;
  std::unordered_map<uint16_t, Count> counts_;
};

}  // namespace mooncake::store
