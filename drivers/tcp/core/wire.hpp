// What travels between two endpoints: frames of one fixed header, some followed by payload. README.md
// explains them.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "mooncake_driver.h"

namespace mooncake_tcp {

using Key = std::array<uint8_t, MC_KEY_BYTES>;

constexpr uint32_t kMagic = 0x3154434d;  // "MCT1" in memory
constexpr uint8_t kVersion = 2;
// A longer frame is a protocol error: slices are at most this long, so such a header is garbage.
constexpr uint64_t kMaxPayload = 1ull << 30;

enum class Op : uint8_t {
  kHello = 1,      // initiator: `key` is the nonce of the endpoint it means to reach; session, see Header
  kWelcome = 2,    // target: `status` MC_OK, or MC_UNREACHABLE when the nonce is another's
  kWrite = 3,      // initiator: header, then `length` bytes for the region
  kWriteDone = 4,  // target: the bytes of this write, and of those before it that were not answered, are in
                   // its memory; or `status` and `flags` say why those of this one are not
  kRead = 5,       // initiator: asks for `length` bytes
  kReadData = 6,   // target: header, then `length` bytes; none when `status` is not MC_OK
};

// Why a target refused (`flags` of its answer).
enum class Refusal : uint16_t {
  kNone = 0,
  kUnknownRegion = 1,
  kWrongKey = 2,
  kOutside = 3,
  kClosing = 4,
  kRevoked = 5,
  kForbidden = 6,  // the key allows the other direction only
};

inline const char* text_of(uint16_t refusal) {
  switch (static_cast<Refusal>(refusal)) {
    case Refusal::kUnknownRegion:
      return "it has no such region (closed, or of another process)";
    case Refusal::kWrongKey:
      return "the access key is wrong";
    case Refusal::kOutside:
      return "the range is outside the region";
    case Refusal::kClosing:
      return "the region is being closed";
    case Refusal::kRevoked:
      return "the access key was revoked";
    case Refusal::kForbidden:
      return "the access key does not allow this direction";
    default:
      return "it gave no reason";
  }
}

// Whether every later request for the same region with the same key will be refused too. An unknown region or
// a wrong key is not: those may be of a request that was spoilt on its way.
inline bool is_final(uint16_t refusal) {
  auto why = static_cast<Refusal>(refusal);
  return why == Refusal::kClosing || why == Refusal::kRevoked;
}

// Little-endian, 64 bytes. Members that an op does not use are 0.
struct Header {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  uint8_t op = 0;
  uint16_t flags = 0;
  uint64_t seq = 0;  // counts the requests of a connection; an answer repeats it
  uint64_t region_id = 0;
  Key key{};
  uint64_t remote_offset = 0;
  uint64_t length = 0;
  int32_t status = MC_OK;
  uint32_t reserved = 0;

  // Of a HELLO: which of the initiator's connections this is. Session 0: one of none, which replaces nothing.
  uint64_t session() const { return region_id; }
  uint16_t lane() const { return flags; }
  uint64_t generation() const { return remote_offset; }

  bool well_formed() const {
    return magic == kMagic && version == kVersion && reserved == 0 && length <= kMaxPayload &&
           op >= static_cast<uint8_t>(Op::kHello) && op <= static_cast<uint8_t>(Op::kReadData);
  }
};

static_assert(sizeof(Header) == 64 && offsetof(Header, key) == 24 && offsetof(Header, status) == 56);
static_assert(std::endian::native == std::endian::little,
              "the wire is little-endian; this host needs byte swaps");

// Takes the same time wherever the keys differ, so that an attacker cannot guess one byte by byte.
inline bool same_key(const Key& a, const Key& b) {
  unsigned difference = 0;
  for (size_t i = 0; i < a.size(); ++i) difference |= static_cast<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

}  // namespace mooncake_tcp
