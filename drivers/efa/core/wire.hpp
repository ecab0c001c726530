// What two endpoints of the driver tell each other in messages, beside the memory that they read and write.
//
// The fabric may deliver messages in any order. Those of a session carry sequence numbers and are handled in
// the order in which they were sent. Hosts are little-endian on both sides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>

#include "mooncake_driver.h"

namespace mooncake::efa {

using Name = std::array<uint8_t, 16>;  // random: of an endpoint, of a session

enum class Kind : uint8_t {
  kHello = 1,  // to the door: begin a session. Ends `previous` first
  kWelcome,    // from the endpoint that the session leads to; status tells whether there is one
  kAsk,        // for region `region` by access key `key`
  kAnswer,     // status, or what is needed to reach the memory, under number `grant`
  kRevoked,    // `grant` is taken back: post nothing under it any more
  kReleased,   // nothing under `grant` is in flight any more
  kPing,
  kPong,
  kGoodbye,   // the sender leaves as soon as it has the answer
  kNotice,    // number `request`, `length` writes before it since the last one, data in `address`
  kNoticed,   // it was delivered
  kNoNotice,  // one of its writes failed: do not wait for the others
  kFarewell,  // to a goodbye: nothing more follows
};

constexpr uint32_t kMagic = 0x3146434d;  // "MCF1"
constexpr uint8_t kVersion = 1;
constexpr size_t kMaxAddress = 128;
constexpr size_t kMaxText = 96;

struct Message {
  uint32_t magic = kMagic;
  uint8_t version = kVersion;
  Kind kind{};
  uint8_t address_length = 0;
  uint8_t text_length = 0;
  int32_t status = 0;     // mc_status
  uint32_t access = 0;    // mc_access
  uint64_t to = 0;        // the receiver's number of the session
  uint64_t from = 0;      // hello, welcome: the sender's
  uint64_t sequence = 0;  // from 1; 0: hello and welcome, which have no place in the order
  uint64_t request = 0;
  uint64_t region = 0;
  uint64_t grant = 0;
  uint64_t memory_key = 0;
  uint64_t base = 0;  // remote address of the region's first byte
  uint64_t length = 0;
  Name session{};   // proves that the sender belongs to the session
  Name key{};       // hello: the endpoint's name
  Name previous{};  // hello: a session of the same connection whose writes must not land any more
  std::array<uint8_t, kMaxAddress> address{};
  std::array<char, kMaxText> text{};

  std::string_view said() const { return {text.data(), text_length}; }
  void say(std::string_view words) {
    text_length = static_cast<uint8_t>(words.size() < kMaxText ? words.size() : kMaxText);
    std::memcpy(text.data(), words.data(), text_length);
  }
  bool sane(size_t bytes) const {
    return bytes == sizeof(Message) && magic == kMagic && version == kVersion &&
           address_length <= kMaxAddress && text_length <= kMaxText;
  }
};
static_assert(std::is_trivially_copyable_v<Message> && sizeof(Message) <= 512);

// The data that goes with a write: the target's number of the session, and the epoch's lower bits.
constexpr uint32_t kSlotBits = 12, kEpochBits = 20;
constexpr uint64_t kEpochMask = (1u << kEpochBits) - 1;
inline uint64_t notice_data(uint32_t slot, uint64_t epoch) {
  return static_cast<uint64_t>(slot) << kEpochBits | (epoch & kEpochMask);
}

// An endpoint's address as the fabric has it.
struct FabricAddress {
  std::array<uint8_t, kMaxAddress> bytes{};
  uint8_t length = 0;
};

// What export_address gives.
struct Address {
  uint32_t magic = kMagic;
  uint32_t format = 0;  // of the fabric's addresses: peers of another kind are not reached
  std::array<char, 32> provider{};
  Name name{};
  FabricAddress door;
};
static_assert(std::is_trivially_copyable_v<Address> && sizeof(Address) <= MC_BLOB_MAX);

}  // namespace mooncake::efa
