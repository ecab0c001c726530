// What names connections to the target's endpoint: those that may bring bytes of writes that are over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace mooncake_tcp {

struct FenceToken {
  struct Lane {
    uint16_t number;
    uint64_t generation;  // and older ones
  };
  uint64_t session = 0;
  std::vector<Lane> lanes;
};

constexpr char kFenceMagic[4] = {'M', 'C', 'T', 'F'};

// Magic, session, then number and generation of each lane, little-endian. Nothing where there is no lane.
inline std::string encode_fence(const FenceToken& token) {
  std::string bytes;
  if (token.lanes.empty()) return bytes;
  auto append = [&bytes](const auto& value) {
    bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
  };
  append(kFenceMagic);
  append(token.session);
  for (const auto& lane : token.lanes) {
    append(lane.number);
    append(lane.generation);
  }
  return bytes;
}

// False when the bytes, which come from a peer, are no such token.
inline bool decode_fence(const void* bytes, size_t length, FenceToken* token) {
  constexpr size_t kHead = sizeof(kFenceMagic) + sizeof(token->session);
  constexpr size_t kLane = sizeof(uint16_t) + sizeof(uint64_t);
  if (bytes == nullptr || length < kHead + kLane || (length - kHead) % kLane != 0) return false;
  auto* at = static_cast<const std::byte*>(bytes);
  if (memcmp(at, kFenceMagic, sizeof(kFenceMagic)) != 0) return false;
  memcpy(&token->session, at + sizeof(kFenceMagic), sizeof(token->session));
  token->lanes.clear();
  for (size_t offset = kHead; offset < length; offset += kLane) {
    FenceToken::Lane lane;
    memcpy(&lane.number, at + offset, sizeof(lane.number));
    memcpy(&lane.generation, at + offset + sizeof(lane.number), sizeof(lane.generation));
    token->lanes.push_back(lane);
  }
  return token->session != 0;
}

}  // namespace mooncake_tcp
