#include "link.hpp"

#include <algorithm>
#include <cstring>

namespace mooncake::efa {

Status Link::open(Fabric& fabric, const LinkSize& size, std::unique_ptr<Link>& link) {
  std::unique_ptr<Link> made(new Link(fabric, size));
  if (Status status = made->start(); !status.ok()) return status;
  link = std::move(made);
  return {};
}

Status Link::start() {
  if (Status status = fabric_.open_port(size_.transfers + size_.sends, size_.receives, port_); !status.ok())
    return status;
  size_t length = address_.bytes.size();
  if (int rc = endpoint()->cm->getname(&endpoint()->fid, address_.bytes.data(), &length); rc != 0)
    return failed(MC_IO, "libfabric does not tell an endpoint's address: " + fabric_.say(rc));
  address_.length = static_cast<uint8_t>(length);
  mailbox_.resize(size_.receives + size_.sends);
  if (fabric_.needs_local(MC_DRAM)) {
    mc_memory memory{};
    memory.kind = MC_DRAM;
    memory.address = reinterpret_cast<uint64_t>(mailbox_.data());
    memory.length = mailbox_.size() * sizeof(Message);
    if (Status status = fabric_.register_memory(memory, fi::kSend | fi::kReceive, mailbox_region_);
        !status.ok())
      return status;
  }
  letters_.resize(mailbox_.size());
  for (size_t i = 0; i < letters_.size(); ++i) {
    Token& token = letters_[i];
    token.link = this;
    token.message = &mailbox_[i];
    token.use = i < size_.receives ? Token::Use::kReceive : Token::Use::kSend;
    if (token.use == Token::Use::kSend) {
      give_back(token);
    } else if (ssize_t rc = post_receive(token); rc != 0) {
      return failed(MC_IO, "libfabric takes no receive: " + fabric_.say(static_cast<int>(rc)));
    }
  }
  transfers_.resize(size_.transfers);
  for (Token& token : transfers_) {
    token.link = this;
    token.next = free_transfers_;
    free_transfers_ = &token;
  }
  return {};
}

void Link::close() {
  if (closed()) return;
  port_.endpoint.reset();
  port_.addresses.reset();
  fabric_.deregister(mailbox_region_);
  waiting_.clear();
  unposted_.clear();
  closed_ns = now_ns();
}

Status Link::reach(const FabricAddress& address, fi::Address& peer) {
  int rc = port_.addresses->ops->insert(port_.addresses.get(), address.bytes.data(), 1, &peer, 0, nullptr);
  if (rc == 1) return {};
  return failed(MC_UNREACHABLE, "libfabric does not take the peer's address" +
                                    (rc < 0 ? ": " + fabric_.say(rc) : std::string()));
}

std::string Link::text_of(const FabricAddress& address) const {
  char text[128] = "";
  size_t length = sizeof text;
  fi::AddressTable* table = port_.addresses.get();
  if (table->ops->straddr != nullptr) table->ops->straddr(table, address.bytes.data(), text, &length);
  text[sizeof text - 1] = 0;
  return text[0] != 0 ? text : "an unknown address";
}

void Link::forget(fi::Address peer) {
  std::erase_if(waiting_, [&](const Waiting& each) { return each.peer == peer; });
}

ssize_t Link::post_receive(Token& token) {
  return endpoint()->msg->recv(endpoint(), token.message, sizeof(Message), mailbox_region_.descriptor,
                               fi::kAddressUnspecified, &token.scratch);
}

void Link::repost(Token& token) {
  if (closed()) return;
  ssize_t rc = post_receive(token);
  if (rc == -EAGAIN) unposted_.push_back(&token);
  if (rc != 0 && rc != -EAGAIN) broken = true;
}

void Link::send(fi::Address peer, const Message& message) {
  if (closed()) return;
  if (!waiting_.empty() || !post_send(peer, message)) waiting_.push_back({peer, message});
}

// False when there is no room now.
bool Link::post_send(fi::Address peer, const Message& message) {
  if (free_send_ == nullptr) return false;
  Token& token = *free_send_;
  *token.message = message;
  ssize_t rc = endpoint()->msg->send(endpoint(), token.message, sizeof(Message), mailbox_region_.descriptor,
                                     peer, &token.scratch);
  if (rc == -EAGAIN) return false;
  if (rc != 0) {
    broken = true;
    return true;
  }
  free_send_ = token.next;
  --free_sends_;
  token.session = message.from;
  token.posted_ns = now_ns();
  return true;
}

bool Link::flush() {
  if (closed()) return false;
  for (size_t count = unposted_.size(); count > 0 && !broken; --count) {
    Token* token = unposted_.front();
    unposted_.erase(unposted_.begin());
    repost(*token);
  }
  while (!waiting_.empty() && post_send(waiting_.front().peer, waiting_.front().message)) {
    waiting_.pop_front();
  }
  return !broken;
}

uint64_t Link::oldest_send_ns() const {
  uint64_t oldest = 0;
  for (const Token& token : letters_) {
    if (token.use == Token::Use::kSend && token.posted_ns != 0 && (oldest == 0 || token.posted_ns < oldest))
      oldest = token.posted_ns;
  }
  return oldest;
}

void Link::give_back(Token& token) {
  if (token.use == Token::Use::kSend) {
    token.posted_ns = 0;
    token.next = free_send_;
    free_send_ = &token;
    ++free_sends_;
  } else if (token.use == Token::Use::kTransfer) {
    token.operation = nullptr;
    token.next = free_transfers_;
    free_transfers_ = &token;
  }
}

}  // namespace mooncake::efa
