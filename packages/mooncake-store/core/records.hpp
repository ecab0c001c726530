// What a master tells a member about objects, as numbered frames, until the member has confirmed them; and
// how a frame lies in bytes, which is also how the ledger of an owner and the pages it sends are made:
//
//   u8 kind, u8 flags, u8 priority, u8 extents, u32 bytes of the frame, a multiple of 8
//   u64 version, 16 bytes digest
//   kStored goes on: u64 bytes of the value, f64 seconds of its soft pin (0: none), u16 bytes of the
//   tenant's name, u16 of the group's, u32 of the key; for each extent u64 segment, u64 offset, u64 bytes
//   in the low 56 bits and the number of the replica above; then tenant, group and key.
//
// All numbers are little-endian, as the machines are that this builds for. Not thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "slots.hpp"

namespace mooncake::store {

static_assert(std::endian::native == std::endian::little);

// kStored: the owner has (some of) the bytes of a value now. kGone: not any more; or, to a writer that is no
// owner, the value it put has gone. kChanged: another priority or pin.
enum class RecordKind : uint8_t { kStored = 1, kGone = 2, kChanged = 3 };

// In flags. kTell: the user's handlers shall hear of it. kPinned: never evicted. The upper four bits: how
// many replicas are wanted, less one.
inline constexpr uint8_t kTell = 1, kPinned = 2, kReplicasShift = 4;

struct RecordHead {
  uint8_t kind, flags, priority, extents;
  uint32_t length;
  uint64_t version;
  Digest digest;
};
static_assert(sizeof(RecordHead) == 32);

struct RecordBody {
  uint64_t nbytes;
  double soft_pin_s;
  uint16_t tenant_length, group_length;
  uint32_t key_length;
};
static_assert(sizeof(RecordBody) == 24);

struct RecordExtent {
  uint64_t segment, offset, nbytes_replica;
  uint64_t nbytes() const { return nbytes_replica & ((1ull << 56) - 1); }
  uint8_t replica() const { return static_cast<uint8_t>(nbytes_replica >> 56); }
};

// One frame of bytes that somebody else made. What it points to is the caller's.
struct RecordView {
  RecordHead head;
  RecordBody body;
  std::vector<RecordExtent> extents;
  std::string_view tenant, group, key, frame;
};

// Takes the first frame off `bytes`; false when they are no whole frame of a kind known here.
bool take_record(std::string_view& bytes, RecordView& record);
// A frame of kStored in the place of what `frame` held.
void make_stored(std::string& frame, RecordHead head, const RecordBody& body, const RecordExtent* extents,
                 std::string_view tenant, std::string_view group, std::string_view key);

struct RecordPage {
  uint64_t first;  // number of its first frame; the others follow
  uint32_t count;
  std::string frames;
};

// The frames to one member. Numbers begin after `before`.
class RecordStream {
 public:
  explicit RecordStream(uint64_t before = 0) : last_(before), seen_(before), read_(before) {}
  // True when it may be time to ring().
  bool append(std::string_view frame);
  uint64_t last() const { return last_; }
  uint64_t seen() const { return seen_; }
  uint64_t unread() const { return last_ - seen_; }
  // Whether the member is to be told now that records wait: some that somebody waits for (all but those of
  // something stored), or many. Says so once until it has read.
  bool ring();
  // Somebody waits for what it has been sent last. True when it may be time to ring().
  bool hurry();
  // The member has everything up to this number.
  void confirm(uint64_t seen);
  // What it has not confirmed, oldest first, about `most_bytes` of it.
  std::vector<const RecordPage*> read(uint64_t most_bytes);

 private:
  std::deque<RecordPage> pages_;
  uint64_t last_, seen_, read_;
  bool urgent_ = false, rung_ = false;
  bool sealed_ = true;  // the last page has been read: what comes goes to a new one
};

}  // namespace mooncake::store
