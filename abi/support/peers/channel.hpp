// A control connection between two endpoints: fixed-size messages, over a unix socket (which may carry a
// descriptor with each) or TCP.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <type_traits>
#include <utility>

#include "../os.hpp"
#include "mooncake_driver.h"

namespace mooncake::driver {

enum class MessageKind : uint32_t {
  kHello = 1,  // initiator: here is my proof that I was given your address
  kWelcome,    // target: here is my proof, and, at the same host, our lease page
  kAsk,        // initiator: may I use region `region_id`? I hold `secret`
  kPart,       // target, before a grant: one of the pieces of the region's memory
  kGrant,      // target: yes, under the number `grant` - or no, for that reason
  kRevoke,     // target: let go of `grant`
  kRelease,    // initiator: nothing of mine touches what `grant` named, nor will
  kBye,        // initiator: nothing of mine touches any memory of yours, nor will
  kDriver,     // what a driver adds; `body` tells
};

constexpr uint32_t kBodyBytes = 256;

// As it lies in memory: the hello compares `version`, which one build of another machine kind would not
// match.
struct Message {
  uint32_t version;
  MessageKind kind;
  int32_t status;    // mc_status of an answer
  uint32_t access;   // mc_access bits of a grant
  uint64_t request;  // chosen by the initiator, repeated by the answer
  uint64_t region_id;
  uint64_t grant;
  uint64_t length;
  uint8_t secret[MC_KEY_BYTES];
  uint32_t slot;   // of a grant: where its lease is (lease.hpp); at the same host only
  uint32_t token;  // of that lease
  uint32_t reserved;
  uint32_t body_length;
  uint8_t body[kBodyBytes];
  char reason[MC_REASON_MAX];
};

Message make_message(MessageKind kind);
void set_reason(Message& message, const Status& status);
Status reason_of(const Message& message);

// The body of a message as a plain struct of the driver.
template <class Body>
void put_body(Message& message, const Body& body) {
  static_assert(sizeof body <= kBodyBytes && std::is_trivially_copyable_v<Body>);
  message.body_length = sizeof body;
  std::memcpy(message.body, &body, sizeof body);
}
// False when it is of another size.
template <class Body>
bool get_body(const Message& message, Body& body) {
  static_assert(sizeof body <= kBodyBytes && std::is_trivially_copyable_v<Body>);
  if (message.body_length != sizeof body) return false;
  std::memcpy(&body, message.body, sizeof body);
  return true;
}

// One end. Never blocks; not thread-safe: it belongs to the service thread.
class Channel {
 public:
  enum class Received { kMessage, kNothing, kEnd, kGarbage };

  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}
  ~Channel() { shut(); }

  int fd() const { return socket_.get(); }

  // Sends, or keeps the message until flush() can. False when the connection has ended.
  bool send(const Message& message, std::shared_ptr<const UniqueFd> passed = nullptr);
  bool flush();
  // Messages wait for the peer to read: listen for EPOLLOUT, and take no more requests from a peer that does
  // not read.
  bool congested() const { return !waiting_.empty(); }

  // The next message; `passed` is the descriptor that came along, if any. kGarbage: a packet that is no
  // message of this version.
  Received receive(Message& message, UniqueFd& passed);

  // Tells the peer at once, also where a forked child holds a copy of the socket.
  void shut();

 private:
  struct Waiting {
    Message message;
    std::shared_ptr<const UniqueFd> passed;
    size_t sent = 0;
  };
  enum class Sent { kYes, kLater, kNever };
  Sent send_now(Waiting& item);

  UniqueFd socket_;
  std::deque<Waiting> waiting_;
  Message partial_;  // a message of which TCP has brought the beginning
  size_t received_ = 0;
  UniqueFd passed_;
};

}  // namespace mooncake::driver
