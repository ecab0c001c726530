#include "target.hpp"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace mooncake::shm {
namespace {

constexpr int kBacklog = 1024;
// When no descriptor is free for a new connection, accepting rests so long instead of spinning.
constexpr uint64_t kAcceptRestNs = 100'000'000;
// Messages taken from one peer before others have their turn.
constexpr int kMessagesPerTurn = 64;
constexpr int kMaxStrangers = 32;
// close() waits so long for copies in flight; a piece of a copy takes about a millisecond.
constexpr double kCloseWaitS = 1.0;

const std::atomic<bool> kNobodyGone{false};

}  // namespace

Status Target::listen() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return system_failure(MC_IO, "cannot create the listening socket", errno);
  sockaddr_un name;
  socklen_t length = socket_name(address_, name);
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&name), length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    return system_failure(MC_IO, "cannot listen on an abstract socket", errno);
  }
  listener_ = std::move(socket);
  loop_.post([this] { loop_.watch(listener_.get(), EPOLLIN, [this](uint32_t) { on_listener(); }); });
  return {};
}

void Target::close() {
  std::vector<std::shared_ptr<Region>> all;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, region] : regions_) all.push_back(region);
  }
  // First revoke everything, then wait once for all of it.
  for (const auto& region : all) (void)withdraw(region, 0);
  uint64_t deadline = deadline_after(kCloseWaitS);
  for (const auto& region : all) (void)withdraw(region, deadline);
}

Status Target::add(const std::shared_ptr<Region>& region) {
  std::lock_guard lock(mutex_);
  if (!regions_.emplace(region->id, region).second) {
    return failed(MC_INVALID, "region " + std::to_string(region->id) + " is registered already");
  }
  return {};
}

Status Target::withdraw(const std::shared_ptr<Region>& region, uint64_t deadline_ns) {
  std::vector<Holder> holders;
  {
    std::lock_guard lock(mutex_);
    regions_.erase(region->id);
    if (!region->withdrawn.exchange(true)) region->own_use.revoke();
    revoke_grants(region->id, holders);
  }
  bool idle = region->own_use.wait_idle(deadline_ns, kNobodyGone);
  for (const Holder& holder : holders) {
    idle = holder.peer->leases->slot(holder.slot).wait_idle(deadline_ns, holder.peer->gone) && idle;
  }
  if (!idle) return failed(MC_TIMEOUT, "operations on the region were still in flight at the deadline");
  release_grants(region->id);
  return {};
}

void Target::revoke_grants(uint64_t region_id, std::vector<Holder>& holders) {
  for (const PeerPointer& peer : peers_) {
    auto found = peer->grants.find(region_id);
    if (found == peer->grants.end()) continue;
    Grant& grant = found->second;
    holders.push_back({peer, grant.slot});
    if (std::exchange(grant.revoked, true)) continue;
    peer->leases->slot(grant.slot).revoke();
    loop_.post([this, peer, region_id] {
      Message notice = make_message(MessageKind::kRevoked);
      notice.region_id = region_id;
      if (!send(peer, notice)) drop(peer);
    });
  }
}

void Target::release_grants(uint64_t region_id) {
  std::lock_guard lock(mutex_);
  for (const PeerPointer& peer : peers_) {
    auto found = peer->grants.find(region_id);
    if (found == peer->grants.end()) continue;
    peer->free_slots.push_back(found->second.slot);
    peer->grants.erase(found);
  }
}

// ---------------------------------------------------------------------------------------------- the service
// thread

void Target::on_listener() {
  for (int i = 0; i < kMessagesPerTurn; ++i) {
    UniqueFd socket(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (socket.valid()) {
      welcome_socket(std::move(socket));
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS) {
      loop_.change(listener_.get(), 0);
      loop_.at(now_ns() + kAcceptRestNs, [this] { loop_.change(listener_.get(), EPOLLIN); });
      return;
    } else {
      return;
    }
  }
}

void Target::welcome_socket(UniqueFd socket) {
  ucred who{};
  socklen_t size = sizeof who;
  bool known = getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) == 0;
  auto peer = std::make_shared<Peer>();
  peer->channel = std::make_unique<Channel>(std::move(socket));
  peer->stranger = !options_.allow_other_users && (!known || who.uid != geteuid());
  // Strangers are told why they are turned away, but may not use up the descriptors of this process.
  if (peer->stranger && strangers_ >= kMaxStrangers) return;
  strangers_ += peer->stranger;
  peer->pidfd = open_pidfd(who.pid);
  bool watched = loop_.watch(peer->channel->fd(), EPOLLIN | EPOLLRDHUP,
                             [this, peer](uint32_t events) { on_event(peer, events); });
  if (watched && peer->pidfd.valid()) {
    watched = loop_.watch(peer->pidfd.get(), EPOLLIN, [this, peer](uint32_t) { drop(peer); });
  }
  if (!watched) return drop(peer);
  {
    std::lock_guard lock(mutex_);
    peers_.push_back(peer);
  }
  loop_.at(deadline_after(options_.answer_timeout_s), [this, weak = std::weak_ptr(peer)] {
    PeerPointer late = weak.lock();
    if (late && !late->greeted) drop(late);
  });
}

void Target::on_event(const PeerPointer& peer, uint32_t epoll_events) {
  if ((epoll_events & EPOLLOUT) != 0) {
    if (!peer->channel->flush()) return drop(peer);
    if (!peer->channel->congested()) loop_.change(peer->channel->fd(), EPOLLIN | EPOLLRDHUP);
  }
  // A peer that does not read its answers is not read either, but its end is still noticed.
  if (peer->channel->congested() && (epoll_events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0)
    return drop(peer);
  for (int i = 0; i < kMessagesPerTurn && !peer->channel->congested(); ++i) {
    Message message;
    UniqueFd passed;  // none is expected; if one came, it is closed here
    Channel::Received received = peer->channel->receive(message, passed);
    if (received == Channel::Received::kNothing) break;
    if (received == Channel::Received::kEnd || !on_message(peer, message)) return drop(peer);
  }
}

bool Target::on_message(const PeerPointer& peer, const Message& message) {
  if (!peer->greeted) return message.kind == MessageKind::kHello && on_hello(peer, message);
  return message.kind == MessageKind::kAsk && on_ask(peer, message);
}

bool Target::on_hello(const PeerPointer& peer, const Message& hello) {
  Message welcome = make_message(MessageKind::kWelcome);
  if (peer->stranger) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    set_reason(welcome,
               failed(MC_UNSUPPORTED, "the peer's shm driver serves only processes of user " +
                                          std::to_string(geteuid()) + " (option allow_other_users)"));
    (void)send(peer, welcome);
    return false;
  }
  if (!equal_in_constant_time(hello.secret, address_.initiator_secret, kSecretBytes)) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  UniqueFd fd;
  std::shared_ptr<LeasePage> leases;
  Status status = LeasePage::create(leases, fd);
  set_reason(welcome, status);
  if (!status.ok()) {
    (void)send(peer, welcome);
    return false;
  }
  peer->greeted = true;
  {
    std::lock_guard lock(mutex_);
    peer->leases = std::move(leases);
  }
  std::memcpy(welcome.secret, address_.target_secret, kSecretBytes);
  return send(peer, welcome, std::make_shared<const UniqueFd>(std::move(fd)));
}

bool Target::on_ask(const PeerPointer& peer, const Message& question) {
  Message answer = make_message(MessageKind::kGrant);
  answer.request = question.request;
  answer.region_id = question.region_id;
  std::shared_ptr<const UniqueFd> fd;
  Status status = grant(*peer, question, answer, fd);
  if (status.code == MC_REFUSED) refused_.fetch_add(1, std::memory_order_relaxed);
  set_reason(answer, status);
  return send(peer, answer, std::move(fd));
}

Status Target::grant(Peer& peer, const Message& question, Message& answer,
                     std::shared_ptr<const UniqueFd>& fd) {
  std::lock_guard lock(mutex_);
  auto found = regions_.find(question.region_id);
  if (found == regions_.end()) {
    return failed(MC_REFUSED,
                  "region " + std::to_string(question.region_id) + " is not registered at the target");
  }
  const Region& region = *found->second;
  if (!equal_in_constant_time(question.secret, region.key.data(), region.key.size())) {
    return failed(MC_REFUSED, "wrong access key for region " + std::to_string(question.region_id));
  }
  auto known = peer.grants.find(region.id);
  if (known == peer.grants.end()) {
    uint32_t slot = peer.slots_used;
    if (!peer.free_slots.empty()) {
      slot = peer.free_slots.back();
      peer.free_slots.pop_back();
    } else if (slot < LeasePage::kSlots) {
      ++peer.slots_used;
    } else {
      return failed(MC_UNSUPPORTED, "the connection holds as many regions as it can");
    }
    known = peer.grants.emplace(region.id, Grant{slot, peer.leases->slot(slot).token()}).first;
  }
  answer.slot = known->second.slot;
  answer.token = known->second.token;
  answer.length = region.length;
  answer.address = reinterpret_cast<uint64_t>(region.base);
  answer.fd_offset = region.fd_offset;
  answer.mode = region.fd ? AccessMode::kMapped : AccessMode::kProcessVm;
  fd = region.fd;
  return {};
}

bool Target::send(const PeerPointer& peer, const Message& message, std::shared_ptr<const UniqueFd> passed) {
  if (peer->gone.load()) return false;
  if (!peer->channel->send(message, std::move(passed))) return false;
  if (peer->channel->congested()) loop_.change(peer->channel->fd(), EPOLLOUT | EPOLLRDHUP);
  return true;
}

void Target::drop(const PeerPointer& peer) {
  if (peer->gone.exchange(true)) return;
  strangers_ -= peer->stranger;
  loop_.forget(peer->channel->fd());
  if (peer->pidfd.valid()) loop_.forget(peer->pidfd.get());
  peer->channel->shut();
  std::lock_guard lock(mutex_);
  peers_.remove(peer);
}

}  // namespace mooncake::shm
