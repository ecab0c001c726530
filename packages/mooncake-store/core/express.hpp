// How the five requests that matter for speed, and their answers, lie in bytes, where client and master use
// the express way (decisions/005): a head, then blocks one after the other without padding. All numbers are
// little-endian, as the machines are that this builds for.
//
// Requests:
// - Locate: u64 of each lease that has ended, 16 bytes digest of each key; kSums: sums are asked for
// - Exist: digests
// - Release: nothing; `id` is the lease
// - Reserve: ended leases, digests, u64 size of each, u32 bytes of each key, then the keys
// - Commit: u64 of each of `sums` checksums, of all values or none; `id` is the reservation, `seen` the last
//   record taken
//
// Answers:
// - Locate: a byte of each key, u64 size of each, with kSummed u64 checksum of each (0: not known), for each
// of `lists` u32 count of rows and the rows, then
//   segments
// - Exist: a byte of each key
// - Release: u32 position of each of `count` broken reads
// - Reserve: a byte of each key, one list of rows, segments, and with kRoom five u64
// - Commit: a byte of each value; for each of `lists` pages of records u64 first, u32 bytes, then the bytes
//
// A row is as in protocol.Placement, a segment u64 id, u32 bytes of its descriptor, then that.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace mooncake::store {

static_assert(std::endian::native == std::endian::little);

// kOtherWay, of an answer: nothing was done; ask by the way that knows everything. Its flags say for how
// long.
enum class Express : uint8_t { kOtherWay, kLocate, kRelease, kExist, kReserve, kCommit };
inline constexpr size_t kExpressKinds = 6;
// Flags of requests, and of answers.
inline constexpr uint8_t kReplace = 1, kSums = 2;
inline constexpr uint8_t kWait = 1, kExpired = 2, kRoom = 4, kSummed = 8;
// Flags of kOtherWay; with none, better for a moment: this request and not the next one of its kind, or all
// of its kind as long as this master and client have each other.
inline constexpr uint8_t kThisOne = 1, kForGood = 2;

struct AskHead {
  Express kind;
  uint8_t flags;
  uint16_t spare;
  uint32_t keys, ended, sums;
  uint64_t epoch, client, id, seen;
};
static_assert(sizeof(AskHead) == 48);

struct AnswerHead {
  Express kind;
  uint8_t flags;
  uint16_t segments;
  uint32_t count, lists, spare;
  uint64_t id;
};
static_assert(sizeof(AnswerHead) == 24);

// Takes numbers and blocks off bytes that somebody else made.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : rest_(bytes) {}

  template <typename T>
  T number() {
    T value{};
    std::string_view bytes = block(sizeof(T));
    if (good_) std::memcpy(&value, bytes.data(), sizeof(T));
    return value;
  }
  std::string_view block(uint64_t nbytes) {
    if (nbytes > rest_.size()) good_ = false;
    if (!good_) return {};
    std::string_view found = rest_.substr(0, nbytes);
    rest_.remove_prefix(nbytes);
    return found;
  }
  template <typename T>
  std::vector<T> numbers(uint64_t count) {
    // Counts are 32 bits, so this does not wrap.
    std::string_view bytes = block(count * sizeof(T));
    std::vector<T> found(bytes.size() / sizeof(T));
    if (!bytes.empty()) std::memcpy(found.data(), bytes.data(), bytes.size());
    return found;
  }
  // Whether there was as much as was taken.
  bool good() const { return good_; }
  bool ended() const { return good_ && rest_.empty(); }

 private:
  std::string_view rest_;
  bool good_ = true;
};

template <typename T>
void add(std::string& bytes, const T& value) {
  bytes.append(reinterpret_cast<const char*>(&value), sizeof(T));
}
template <typename T>
void add_all(std::string& bytes, const std::vector<T>& values) {
  bytes.append(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

}  // namespace mooncake::store
