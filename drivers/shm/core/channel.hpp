// The control socket between an initiator and a target: fixed-size messages, some of which carry a
// descriptor.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>

#include "mooncake_driver.h"
#include "os.hpp"

namespace mooncake::shm {

enum class MessageKind : uint32_t {
  kHello = 1,  // initiator: here is my proof that I was given your address
  kLife,       // target, before the welcome: my sign of life
  kWelcome,    // target: here is my proof, and our lease page
  kAsk,        // initiator: may I use region `region_id`? I hold `secret`
  kGrant,      // target: yes, in this way - or no, for that reason
  kRevoked,    // target: `region_id` under the key `secret` is withdrawn; let go of it
};

enum class AccessMode : uint32_t {
  kMapped = 1,     // the descriptor that comes along, from `fd_offset`
  kProcessVm = 2,  // `address` in the target's address space, by process_vm_readv and process_vm_writev
};

// One packet, as it lies in memory: both ends run on one machine, and the hello compares `version`.
struct Message {
  uint32_t version;
  MessageKind kind;
  int32_t status;  // mc_status of an answer
  AccessMode mode;
  uint32_t access;  // mc_access bits of a grant
  uint32_t slot;
  uint32_t token;
  uint64_t request;  // chosen by the initiator, repeated by the answer
  uint64_t region_id;
  uint64_t length;
  uint64_t address;
  uint64_t fd_offset;
  uint8_t secret[MC_KEY_BYTES];
  char reason[MC_REASON_MAX];
};

constexpr uint32_t kWireVersion = 2;

Message make_message(MessageKind kind);
void set_reason(Message& message, const Status& status);
Status reason_of(const Message& message);

// One end of a control socket. Never blocks; not thread-safe: it belongs to the service thread.
class Channel {
 public:
  enum class Received { kMessage, kNothing, kEnd, kGarbage };

  explicit Channel(UniqueFd socket) : socket_(std::move(socket)) {}
  ~Channel();

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
  };
  enum class Sent { kYes, kLater, kNever };
  Sent send_now(const Waiting& item);

  UniqueFd socket_;
  std::deque<Waiting> waiting_;
};

}  // namespace mooncake::shm
