// Messages that travel behind the writes of a transfer: what both sides keep of them, and their bytes.
//
// A notice is: token | u64 sequence | u64 after | u16 method length | method | payload (little endian). The
// token is a secret that the receiver gave out over one channel connection: it names the sender as that
// connection does. `after` is how many messages went over the channel before it, so that it does not overtake
// them.
#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>

#include "mooncake_driver.h"
#include "schedule.hpp"

namespace mooncake {

constexpr char kAskForNotices[] = "mooncake.notices";  // method of the request for a token
constexpr char kNoticeAgain[] = "mooncake.notice";     // a notice that may have been delivered already
constexpr size_t kNoticeTokenBytes = 16;
constexpr size_t kNoticeHeadBytes = kNoticeTokenBytes + 18;
// So many sequences a receiver tells apart; a sender never has more between its oldest and its newest open
// one.
constexpr uint64_t kNoticeWindow = 4096;

// A notice as its receiver reads it. Its text lies in what was parsed.
struct NoticeView {
  std::string token;
  uint64_t sequence = 0;
  uint64_t after = 0;
  const char* method = nullptr;
  size_t method_length = 0;
  const char* payload = nullptr;
  size_t payload_length = 0;

  // False when the bytes are none.
  bool parse(const char* data, size_t length);
};

// ---- the sender's side

// The right to send notices to one peer, and which of them may still be delivered. Thread-safe.
class NoticeTicket {
 public:
  // True for the first caller, who then asks the peer.
  bool ask() { return !asked_.exchange(true); }
  void answer(const std::string& token);
  bool given() const { return given_.load(std::memory_order_acquire); }
  // The bytes of the next notice; false while too many before it are open.
  bool seal(uint64_t after, const std::string& method, const std::string& payload, std::string* bytes,
            uint64_t* sequence);
  // Nothing of it is sent any more.
  void resolve(uint64_t sequence);

 private:
  std::atomic<bool> asked_{false}, given_{false};
  std::mutex mutex_;  // what follows
  std::string token_;
  uint64_t next_ = 1;
  std::set<uint64_t> open_;
};

// What one run of a transfer has to tell the peer when its bytes have moved.
struct Message {
  static constexpr size_t kNoRail = ~size_t{0};
  enum class Fate : uint8_t {
    kUntold,     // goes over the channel
    kDoubtful,   // went as a notice that failed: it may have been delivered
    kDelivered,  // by the driver
  };

  Message(std::string method, std::string payload) : method(std::move(method)), payload(std::move(payload)) {}

  const std::string method;
  const std::string payload;

  std::atomic<bool> broken{false};  // a write failed: what comes behind it on its rail proves nothing

  // Guarded by the engine's mutex.
  Transfer* transfer = nullptr;  // while a notice waits for its writes or is with the driver
  Slice* slice = nullptr;        // the notice
  size_t rail = kNoRail;         // that every write went to
  uint64_t owed = 0;             // writes that no driver has accepted yet

  // Of whoever sends it, then of whoever sees it complete.
  std::string bytes;
  uint64_t sequence = 0;
  Fate fate = Fate::kUntold;
};

// ---- the receiver's side

// Which notices of one sender have come, so that each is delivered once.
class NoticeWindow {
 public:
  // True the first time; false as well for what is too old to tell.
  bool first(uint64_t sequence);

 private:
  std::bitset<kNoticeWindow> seen_;
  uint64_t highest_ = 0;
};

// Which channel connection each token was given to. Thread-safe.
class NoticeTokens {
 public:
  // Empty when the system gives no random bytes.
  std::string give(uint64_t connection);
  void take_back(uint64_t connection);
  uint64_t connection_of(const std::string& token);  // 0: of none
  bool any() const { return count_.load(std::memory_order_relaxed) != 0; }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, uint64_t> connections_;
  std::atomic<size_t> count_{0};
};

}  // namespace mooncake
