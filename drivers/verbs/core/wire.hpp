// What two endpoints say to one another over the control socket of a connection.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "device.hpp"
#include "mooncake_driver.h"

namespace mooncake::verbs {

using Nonce = std::array<uint8_t, 16>;

constexpr uint32_t kMagic = 0x3156434d;  // "MCV1"
constexpr uint32_t kMaxPayload = 64 << 10;
constexpr size_t kHeaderBytes = 12;
constexpr size_t kMaxQps = 16;

enum class Message : uint8_t {
  kHello = 1,
  kWelcome = 2,
  kImport = 3,
  kImported = 4,
  kRest = 5,
  kRested = 6,
  kTaken = 7,  // only to who has sent notices into the places that WELCOME named
};

struct QpAddress {
  uint32_t number = 0;
  uint32_t psn = 0;
};

// HELLO: make queue pairs for mine. WELCOME: here they are, and those of older generations are gone.
struct Greeting {
  Nonce nonce{};    // of the target; HELLO only
  Nonce session{};  // of the connection, for its life
  uint64_t generation = 0;
  int32_t status = MC_OK;  // WELCOME only, as the reason
  uint8_t mtu = 0;
  uint8_t rd_atomic = 0;
  uint8_t ethernet = 0;
  ibv::Gid gid{};
  uint16_t lid = 0;
  std::vector<QpAddress> qps;
  // WELCOME only, when all is well: places for notices, `slots` for each queue pair, one after the other. An
  // older peer does not say it, and takes it for a reason.
  uint64_t ring_iova = 0;
  uint32_t ring_rkey = 0;
  uint8_t ring_slots = 0;
  std::string reason;  // when it is not
};

// The target has taken so many notices that came through a queue pair: their places are free.
struct Taken {
  uint64_t generation = 0;
  uint8_t qp = 0;
  uint32_t count = 0;
};

struct ImportRequest {
  uint64_t ask = 0;
  uint64_t region_id = 0;
  std::array<uint8_t, MC_KEY_BYTES> key{};
};

struct ImportAnswer {
  uint64_t ask = 0;
  int32_t status = MC_OK;
  uint32_t access = 0;
  uint64_t iova = 0;
  uint64_t length = 0;
  uint32_t chunk_shift = 0;
  std::vector<uint32_t> rkeys;
  std::string reason;
};

// Little-endian, without padding.
class Writer {
 public:
  explicit Writer(Message kind) : bytes_(kHeaderBytes, '\0') { bytes_[4] = static_cast<char>(kind); }
  template <class Number>
  Writer& number(Number value) {
    for (size_t i = 0; i < sizeof value; ++i)
      bytes_.push_back(static_cast<char>(static_cast<std::make_unsigned_t<Number>>(value) >> (8 * i)));
    return *this;
  }
  Writer& bytes(const void* from, size_t length) {
    bytes_.append(static_cast<const char*>(from), length);
    return *this;
  }
  std::string finish();

 private:
  std::string bytes_;
};

// Every read fails after one did; ok() tells.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}
  template <class Number>
  void number(Number* value) {
    uint64_t read = 0;
    if (!take(sizeof *value)) return;
    for (size_t i = 0; i < sizeof *value; ++i) read |= uint64_t{static_cast<uint8_t>(taken_[i])} << (8 * i);
    *value = static_cast<Number>(read);
  }
  void bytes(void* to, size_t length) {
    if (take(length)) std::memcpy(to, taken_.data(), length);
  }
  std::string rest() { return std::string(bytes_.substr(0, MC_REASON_MAX - 1)); }
  size_t left() const { return bytes_.size(); }
  bool ok() const { return ok_; }

 private:
  bool take(size_t length) {
    ok_ = ok_ && bytes_.size() >= length;
    if (!ok_) return false;
    taken_ = bytes_.substr(0, length);
    bytes_.remove_prefix(length);
    return true;
  }
  std::string_view bytes_, taken_;
  bool ok_ = true;
};

std::string encode(Message kind, const Greeting& greeting);
bool decode(std::string_view payload, Greeting& greeting);
std::string encode(const Taken& taken);
bool decode(std::string_view payload, Taken& taken);
std::string encode(const ImportRequest& request);
bool decode(std::string_view payload, ImportRequest& request);
std::string encode(const ImportAnswer& answer);
bool decode(std::string_view payload, ImportAnswer& answer);

}  // namespace mooncake::verbs
