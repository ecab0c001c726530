// One endpoint of the fabric with what is posted to it: a mailbox for messages, and tokens for transfers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "fabric.hpp"
#include "wire.hpp"

namespace mooncake::efa {

class Link;
struct Operation;

// Goes with each posted operation and comes back with its completion.
struct Token {
  enum class Use : uint8_t { kReceive, kSend, kTransfer };

  fi::Context2 scratch{};  // the provider's; first, because its address is what libfabric gets
  Link* link = nullptr;
  Token* next = nullptr;           // while it is free
  Operation* operation = nullptr;  // a transfer's
  Message* message = nullptr;      // a send's or receive's
  uint64_t session = 0;            // a send's: whose it is
  uint64_t posted_ns = 0;          // a send's
  Use use = Use::kTransfer;
};

struct LinkSize {
  size_t transfers;
  size_t sends;
  size_t receives;
};

// With the driver's lock held. Closing it is the one way to be sure that nothing that was posted to it, or to
// its address by others, touches memory any more. A closed one stays until late completions cannot come.
class Link {
 public:
  static Status open(Fabric& fabric, const LinkSize& size, std::unique_ptr<Link>& link);
  ~Link() { close(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  void close();
  bool closed() const { return port_.endpoint == nullptr; }
  const FabricAddress& address() const { return address_; }
  fi::Endpoint* endpoint() const { return port_.endpoint.get(); }

  Status reach(const FabricAddress& address, fi::Address& peer);
  // An address as libfabric writes it, for messages.
  std::string text_of(const FabricAddress& address) const;
  // Nothing more to this peer. Its address stays until the link is closed: providers take what a peer sent
  // before for a message of one that they know.
  void forget(fi::Address peer);

  // Sends now or, when the fabric has no room, with a later flush(); it is never lost but with the link.
  void send(fi::Address peer, const Message& message);
  // What the fabric did not take at the last try. False when the link is of no more use.
  bool flush();
  bool sending() const { return free_sends_ < size_.sends || !waiting_.empty(); }
  // When the oldest message that is still on its way was posted; 0: none is.
  uint64_t oldest_send_ns() const;
  // A receive, send or transfer is over.
  void give_back(Token& token);
  // Posts a receive again.
  void repost(Token& token);

  // Null when as many transfers are posted as the fabric has room for.
  Token* take_transfer() {
    Token* token = free_transfers_;
    if (token != nullptr) free_transfers_ = token->next;
    return token;
  }
  bool has_room_for_two() const { return free_transfers_ != nullptr && free_transfers_->next != nullptr; }
  // Whether something waits for room that no completion may announce.
  bool stalled() const { return !waiting_.empty() || !unposted_.empty(); }
  std::vector<Token>& transfers() { return transfers_; }

  bool incoming = false;   // leads to memory of this side
  uint32_t sessions = 0;   // that use it
  uint64_t closes_ns = 0;  // not 0: nobody uses it, and it is closed then
  uint64_t closed_ns = 0;  // when it was closed
  bool broken = false;     // it cannot post: close it

 private:
  struct Waiting {
    fi::Address peer;
    Message message;
  };

  Link(Fabric& fabric, const LinkSize& size) : fabric_(fabric), size_(size) {}
  Status start();
  ssize_t post_receive(Token& token);
  bool post_send(fi::Address peer, const Message& message);

  Fabric& fabric_;
  const LinkSize size_;
  Port port_;
  FabricAddress address_;
  MemoryRegion mailbox_region_;
  std::vector<Message> mailbox_;
  std::vector<Token> letters_;  // receives, then sends
  std::vector<Token> transfers_;
  std::vector<Token*> unposted_;  // receives that the fabric had no room for
  std::deque<Waiting> waiting_;
  Token* free_send_ = nullptr;
  Token* free_transfers_ = nullptr;
  size_t free_sends_ = 0;
};

}  // namespace mooncake::efa
