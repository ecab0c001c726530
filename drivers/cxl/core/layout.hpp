// What a pool holds, byte for byte. Several hosts map it at once, so nothing here may change within a
// version.
//
// Every word has one writer, or is changed only by processes of one host under that host's file lock: memory
// that is not coherent between hosts has no atomic operations across them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "mooncake_driver.h"

namespace mooncake::cxl {

constexpr char kMagic[8] = {'M', 'C', 'C', 'X', 'L', 'P', 'L', '1'};
constexpr uint32_t kVersion = 1;
constexpr uint64_t kLine = 64;
constexpr uint64_t kUnit = 4096;  // blocks begin and end at multiples of it
constexpr uint32_t kMostHosts = 16;
constexpr uint32_t kMembers = 128;  // processes of one host
constexpr uint32_t kUses = 64;      // threads of one process that copy at a time
constexpr uint32_t kGrants = 1024;  // keys of one process
constexpr uint32_t kBlocks = 4096;  // of one host's share
constexpr uint32_t kNameBytes = 64;

static_assert(std::atomic<uint64_t>::is_always_lock_free, "the words are shared between processes");

// The first page. Written once, by who formats the pool; `checksum` covers what is before it.
struct Header {
  char magic[8];
  uint32_t version;
  uint32_t hosts;
  uint8_t uuid[16];
  uint64_t pool_bytes;
  uint32_t members, uses, grants, blocks;  // the sizes of the tables, as above
  uint64_t control_bytes;                  // of each host's tables
  uint64_t data_offset;                    // where the first share begins
  uint64_t share_bytes;                    // of each host's data
  uint32_t checksum;
};

// A process that takes part. Its tables of uses and grants are its own; the lock guards joining and leaving.
struct alignas(64) Member {
  std::atomic<uint64_t> word;  // epoch << 1 | whether it is there
  uint8_t boot_id[16];
  uint32_t pid;
  alignas(64) std::atomic<uint64_t> beat;  // goes up as long as it lives
  alignas(64) std::atomic<uint32_t> life;  // a robust futex of its thread: the kernel marks it at its end
};
static_assert(sizeof(Member) == 192);

// What a thread is copying from or to: 0, or grant_name() of it. The owner of the grant looks here.
struct alignas(64) Use {
  std::atomic<uint64_t> grant;
};

// A key to a part of the pool. The key itself is not here: it opens the region through other drivers too.
struct alignas(64) Grant {
  std::atomic<uint64_t> word;  // generation << 1 | whether it is valid
  uint64_t region_id;
  uint64_t offset;  // in the pool
  uint64_t length;
  uint32_t access;                     // mc_access bits
  alignas(64) uint8_t key_digest[32];  // SHA-256
};
static_assert(sizeof(Grant) == 128);

// A piece of the share that somebody has. There is no other record of what is taken, so none can disagree.
struct alignas(64) Block {
  std::atomic<uint64_t> state;  // kFree, kTaken or kKept; set last, cleared first
  std::atomic<uint64_t> owner;  // owner_word() of a member, 0: nobody has it now
  uint64_t offset;
  uint64_t length;
  uint32_t to_keep;   // it becomes kKept once its bytes are zero
  uint32_t checksum;  // of offset, length, to_keep, name, the block's number and the pool's uuid
  alignas(64) char name[kNameBytes];
};
static_assert(sizeof(Block) == 128);

constexpr uint64_t kFree = 0;
constexpr uint64_t kTaken = 0x4e454b4154434d43;  // a stray write is none of the three
constexpr uint64_t kKept = 0x5450454b44434d43;   // stays when its owner ends, under its name

constexpr uint64_t rounded_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

constexpr uint64_t kMemberTable = 0;
constexpr uint64_t kUseTable = kMemberTable + rounded_up(kMembers * sizeof(Member), kUnit);
constexpr uint64_t kGrantTable = kUseTable + uint64_t{kMembers} * kUses * sizeof(Use);
constexpr uint64_t kBlockTable = kGrantTable + uint64_t{kMembers} * kGrants * sizeof(Grant);
constexpr uint64_t kControlBytes = rounded_up(kBlockTable + kBlocks * sizeof(Block), kUnit);
constexpr uint64_t kLeastShare = 1 << 20;

// Members are numbered through all hosts, host after host.
inline uint64_t grant_name(uint32_t member, uint32_t index) { return (uint64_t{member} + 1) << 32 | index; }
inline uint64_t owner_word(uint32_t member, uint64_t epoch) { return epoch << 16 | (member + 1); }
inline uint64_t valid_word(uint64_t generation) { return generation << 1 | 1; }

// How a peer finds an endpoint: which pool, and which of its members.
struct Address {
  uint32_t version;
  uint32_t member;
  uint8_t uuid[16];
  uint64_t epoch;
};

// What export_key() tells of a grant. The pool, the member and its epoch are those of the address.
struct KeyBlob {
  uint32_t version;
  uint32_t member;
  uint32_t index;
  uint32_t reserved;
  uint64_t epoch;
  uint64_t generation;
};

}  // namespace mooncake::cxl
