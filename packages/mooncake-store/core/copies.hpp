// Replicas that are made of objects that are there: to replace lost ones, for hot keys, or because a segment
// is going to leave. The room of one is a slot that is reserved, like that of a put; its source is leased
// until the copy has ended.
#pragma once

#include <cstdint>
#include <vector>

#include "crowds.hpp"
#include "slots.hpp"

namespace mooncake::store {

inline constexpr uint8_t kMaxReplicas = 16;  // 4 bits of a record's flags; also MAX_REPLICAS of policy.py

// What became of a copy; the numbers are those of protocol.CopyOutcome.
// kPending: begun, or yet to begin. kStored: the replica is there now. kThere: it was there already. kGone:
// the object was removed, replaced, evicted or lost. kFull: no room (now). kQuota: beyond the tenant's.
// kNowhere: no segment may take it. kLost: the target or the source has gone meanwhile. kFailed: the mover
// gave it up. kBusy: another replica of it is being made.
enum class Copied : uint8_t {
  kPending,
  kStored,
  kThere,
  kGone,
  kFull,
  kQuota,
  kNowhere,
  kLost,
  kFailed,
  kBusy
};

struct CopyWish {
  uint32_t mover = 0;    // the member that moves the bytes; best an owner of the source
  uint64_t target = 0;   // id of a segment; 0: any that suits
  uint64_t leaving = 0;  // the replica in this segment goes when the new one is known to its owner; 0: none
  bool evicts = false;   // others leave for it, in the usual order; the object itself if it comes first
  bool bounded = false;  // by the tenant's quota
  // Ids of segments that only take it when no other may, and there is no target.
  std::vector<uint64_t> avoid = {};
};

struct CopyBegun {
  Copied outcome = Copied::kPending;
  uint32_t slot = kNoSlot;  // of the room, when it is pending
  uint64_t nbytes = 0;
  std::vector<uint64_t> source, target;  // rows, see object_map.hpp
};

// One copy in progress.
struct Copy {
  Ref source;
  uint8_t replica;  // of the source that is read
  uint64_t leaving;
};

// An object that lacks replicas, and who may make one.
struct Mending {
  Ref ref;
  uint32_t mover;
};

// A step through what lies in a segment that is to become empty.
struct Evacuation {
  std::vector<Ref> todo;  // have to be copied elsewhere
  uint32_t next = 0;      // where to go on; kNoSlot after the last one
  // Copied, and still being read here; copied, and not yet known to its new owner; being written by a put;
  // being copied now.
  uint64_t leased = 0, arriving = 0, reserved = 0, copying = 0;
};

// Where the whole replicas of an object are.
struct Whereabouts {
  Ref ref{kNoSlot, 0};             // kNoSlot: it is not there
  uint32_t mover = 0;              // an owner of one of them
  uint32_t replicas = 0;           // those leaving not counted
  std::vector<uint64_t> segments;  // ids; of replicas in several pieces, all of them
};

}  // namespace mooncake::store
