#include "grantor.hpp"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <utility>

#include "accepting.hpp"

namespace mooncake::driver {
namespace {

constexpr int kBacklog = 1024;
constexpr int kMessagesPerTurn = 64;
constexpr int kMaxStrangers = 32;
constexpr double kCloseWaitS = 1.0;

// Numeric host:port of who is at the other end of a TCP connection.
std::string name_at_network(int socket) {
  sockaddr_storage at{};
  socklen_t size = sizeof at;
  char host[NI_MAXHOST], port[NI_MAXSERV];
  bool known = getpeername(socket, reinterpret_cast<sockaddr*>(&at), &size) == 0 &&
               getnameinfo(reinterpret_cast<sockaddr*>(&at), size, host, sizeof host, port, sizeof port,
                           NI_NUMERICHOST | NI_NUMERICSERV) == 0;
  if (!known) return "a host that has hung up";
  return at.ss_family == AF_INET6 ? "[" + std::string(host) + "]:" + port : std::string(host) + ":" + port;
}

}  // namespace

Status Grantor::listen() {
  if (Status status = listen_unix(); !status.ok()) return status;
  if (settings_.listen_tcp) {
    if (Status status = listen_tcp(); !status.ok()) return status;
  }
  loop_.post([this] {
    watch_listener(unix_listener_.get(), false);
    if (tcp_listener_.valid()) watch_listener(tcp_listener_.get(), true);
  });
  return {};
}

Status Grantor::listen_unix() {
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return system_failure(MC_IO, "cannot create the listening socket", errno);
  sockaddr_un name;
  socklen_t length = socket_name(address_, name);
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&name), length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0)
    return system_failure(MC_IO, "cannot listen on an abstract socket", errno);
  unix_listener_ = std::move(socket);
  return {};
}

Status Grantor::listen_tcp() {
  sockaddr_storage at;
  socklen_t length = socket_address(address_, at);
  UniqueFd socket(::socket(at.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return system_failure(MC_IO, "cannot create the listening socket", errno);
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&at), length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0 ||
      getsockname(socket.get(), reinterpret_cast<sockaddr*>(&at), &length) != 0)
    return system_failure(MC_IO, "cannot listen at the host of option host", errno);
  address_.port = ntohs(at.ss_family == AF_INET ? reinterpret_cast<sockaddr_in&>(at).sin_port
                                                : reinterpret_cast<sockaddr_in6&>(at).sin6_port);
  tcp_listener_ = std::move(socket);
  return {};
}

void Grantor::close() {
  std::vector<std::shared_ptr<Owned>> all;
  {
    std::lock_guard lock(mutex_);
    for (auto& [id, region] : regions_) all.push_back(region);
  }
  // First revoke everything, then wait once for all of it.
  for (const auto& region : all) (void)withdraw(region, 0);
  uint64_t deadline = deadline_after(kCloseWaitS);
  for (const auto& region : all) (void)withdraw(region, deadline);
  std::lock_guard lock(mutex_);
  for (const PeerPointer& peer : peers_) peer->channel->shut();
}

Status Grantor::add(const std::shared_ptr<Owned>& region) {
  std::lock_guard lock(mutex_);
  if (regions_.emplace(region->id, region).second) return {};
  return failed(MC_INVALID, "region " + std::to_string(region->id) + " is registered already");
}

Status Grantor::withdraw(const std::shared_ptr<Owned>& region, uint64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  region->withdrawn = true;
  regions_.erase(region->id);
  revoke_grants(*region, nullptr);
  return wait(*region, nullptr, deadline_ns, lock);
}

Status Grantor::grant(const std::shared_ptr<Owned>& region, const uint8_t* key, uint32_t access) {
  std::lock_guard lock(mutex_);
  if (region->withdrawn) return failed(MC_INVALID, "the memory is being deregistered");
  return region->keys.add(key, access);
}

Status Grantor::revoke(const std::shared_ptr<Owned>& region, const uint8_t* key, uint64_t deadline_ns) {
  std::unique_lock lock(mutex_);
  if (Status status = region->keys.revoke(key); !status.ok()) return status;
  Key name{};
  if (key != nullptr) name = key_from(key);
  const Key* which = key == nullptr ? nullptr : &name;
  revoke_grants(*region, which);
  return deadline_ns == 0 ? Status{} : wait(*region, which, deadline_ns, lock);
}

void Grantor::revoke_grants(const Owned& region, const Key* key) {
  for (const PeerPointer& peer : peers_) {
    for (auto& [number, grant] : peer->grants) {
      if (grant.region.get() != &region || (key != nullptr && grant.key != *key)) continue;
      if (std::exchange(grant.revoked, true)) continue;
      if (peer->leases) peer->leases->slot(grant.slot).revoke();
      loop_.post([this, peer, number = number] {
        Message notice = make_message(MessageKind::kRevoke);
        notice.grant = number;
        if (!send(peer, notice)) hang_up(peer);
      });
    }
  }
}

Status Grantor::wait(const Owned& region, const Key* key, uint64_t deadline_ns,
                     std::unique_lock<std::mutex>& lock) {
  auto holds = [&](const PeerPointer& peer) {
    return std::any_of(peer->grants.begin(), peer->grants.end(), [&](const auto& each) {
      const Grant& grant = each.second;
      return grant.region.get() == &region && (key == nullptr || grant.key == *key);
    });
  };
  auto idle = [&] { return std::none_of(peers_.begin(), peers_.end(), holds); };
  if (released_.wait_until(lock, time_point(deadline_ns), idle)) return {};
  auto first = std::find_if(peers_.begin(), peers_.end(), holds);
  auto all = std::count_if(first, peers_.end(), holds);
  return failed(MC_TIMEOUT, std::to_string(all) + " connections of peers, such as that of " + (*first)->name +
                                ", had not let go of the memory at the deadline");
}

std::shared_ptr<Owned> Grantor::check(const Session& session, uint64_t grant, uint32_t access,
                                      uint64_t offset, uint64_t length, Status& refusal) {
  std::lock_guard lock(mutex_);
  const auto& grants = static_cast<const Peer&>(session).grants;
  auto found = grants.find(grant);
  if (found == grants.end() || found->second.revoked) {
    refusal = failed(MC_REFUSED, "the region was deregistered or its key revoked by its owner");
  } else if ((found->second.access & access) != access) {
    refusal = failed(MC_REFUSED, "the key does not allow it");
  } else if (offset > found->second.region->length || length > found->second.region->length - offset) {
    refusal = failed(MC_REFUSED, "the range is outside the region");
  } else {
    return found->second.region;
  }
  refused_.fetch_add(1, std::memory_order_relaxed);
  return nullptr;
}

// ---------------------------------------------------------------------------------------------- the service
// thread

void Grantor::watch_listener(int fd, bool tcp) {
  loop_.watch(fd, EPOLLIN, [this, fd, tcp](uint32_t) { on_listener(fd, tcp); });
}

void Grantor::on_listener(int fd, bool tcp) {
  for (int i = 0; i < kMessagesPerTurn; ++i) {
    UniqueFd socket;
    Accepted found = accept_next(fd, socket);
    if (found == Accepted::kRest) {
      loop_.change(fd, 0);
      loop_.at(now_ns() + kAcceptRestNs, [this, fd] { loop_.change(fd, EPOLLIN); });
    }
    if (found != Accepted::kPeer) return;
    welcome_socket(std::move(socket), tcp);
  }
}

void Grantor::welcome_socket(UniqueFd socket, bool tcp) {
  auto peer = std::make_shared<Peer>();
  peer->tcp = tcp;
  if (tcp) {
    int on = 1;
    setsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    peer->name = name_at_network(socket.get());
  } else {
    ucred who{};
    socklen_t size = sizeof who;
    bool known = getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &who, &size) == 0;
    peer->stranger = !settings_.allow_other_users && (!known || who.uid != geteuid());
    peer->peer = {who.pid, known && who.pid == getpid(), true};
    peer->pidfd = open_pidfd(who.pid);
    peer->name = who.pid != 0 ? "process " + std::to_string(who.pid) : "a process of another pid namespace";
  }
  // Strangers are told why they are turned away, but may not use up the descriptors of this process. At the
  // network everybody is one until the greeting.
  if ((peer->stranger || tcp) && strangers_ >= kMaxStrangers) return;
  peer->channel = std::make_unique<Channel>(std::move(socket));
  strangers_ += peer->stranger || tcp;
  {
    std::lock_guard lock(mutex_);
    peers_.push_back(peer);
  }
  bool watched = loop_.watch(peer->channel->fd(), EPOLLIN | EPOLLRDHUP,
                             [this, peer](uint32_t events) { on_event(peer, events); });
  if (watched && peer->pidfd.valid())
    watched = loop_.watch(peer->pidfd.get(), EPOLLIN, [this, peer](uint32_t) { gone(peer); });
  if (!watched) return gone(peer);
  loop_.at(deadline_after(settings_.answer_timeout_s), [this, weak = std::weak_ptr(peer)] {
    PeerPointer late = weak.lock();
    if (late && !late->greeted) hang_up(late);
  });
}

void Grantor::on_event(const PeerPointer& peer, uint32_t epoll_events) {
  Channel& channel = *peer->channel;
  if ((epoll_events & EPOLLOUT) != 0) {
    if (!channel.flush()) return hang_up(peer);
    if (!channel.congested()) loop_.change(channel.fd(), EPOLLIN | EPOLLRDHUP);
  }
  // A peer that does not read its answers is not read either, but its end is still noticed.
  if (channel.congested() && (epoll_events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) return hang_up(peer);
  for (int i = 0; i < kMessagesPerTurn && !peer->closed && !channel.congested(); ++i) {
    Message message;
    UniqueFd passed;
    Channel::Received received = channel.receive(message, passed);
    if (received == Channel::Received::kNothing) break;
    bool good = received == Channel::Received::kMessage && on_message(peer, message, std::move(passed));
    if (!good) return hang_up(peer);
  }
}

bool Grantor::on_message(const PeerPointer& peer, const Message& message, UniqueFd passed) {
  if (!peer->greeted) return message.kind == MessageKind::kHello && on_hello(peer, message);
  switch (message.kind) {
    case MessageKind::kAsk:
      return on_ask(peer, message);
    case MessageKind::kRelease:
      on_release(*peer, message.grant);
      return true;
    case MessageKind::kBye:
      gone(peer);
      return true;
    case MessageKind::kDriver:
      return hooks_.on_message && hooks_.on_message(peer, message, std::move(passed));
    default:
      return false;
  }
}

bool Grantor::on_hello(const PeerPointer& peer, const Message& hello) {
  Message welcome = make_message(MessageKind::kWelcome);
  if (peer->stranger) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    set_reason(welcome,
               failed(MC_UNSUPPORTED, std::string("the peer's ") + address_.driver +
                                          " driver serves only processes of user " +
                                          std::to_string(geteuid()) + " (option allow_other_users)"));
    (void)send(peer, welcome);
    return false;
  }
  if (!equal_in_constant_time(hello.secret, address_.initiator_secret, kSecretBytes)) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  peer->greeted = true;
  strangers_ -= peer->tcp;
  std::memcpy(welcome.secret, address_.target_secret, kSecretBytes);
  if (peer->tcp) return send(peer, welcome);
  UniqueFd fd;
  std::shared_ptr<LeasePage> leases;
  Status status = LeasePage::create(leases, fd);
  set_reason(welcome, status);
  {
    std::lock_guard lock(mutex_);
    peer->leases = std::move(leases);
  }
  bool sent = send(peer, welcome, fd.valid() ? std::make_shared<const UniqueFd>(std::move(fd)) : nullptr);
  return sent && status.ok();
}

bool Grantor::on_ask(const PeerPointer& peer, const Message& question) {
  Offer offer;
  Status status = answer_for(*peer, question, offer);
  if (status.code == MC_REFUSED) refused_.fetch_add(1, std::memory_order_relaxed);
  offer.grant.request = question.request;
  offer.grant.region_id = question.region_id;
  set_reason(offer.grant, status);
  if (status.ok()) {
    for (Offer::Part& part : offer.parts) {
      part.message.request = question.request;
      if (!send(peer, part.message, std::move(part.fd))) return false;
    }
  }
  return send(peer, offer.grant);
}

Status Grantor::answer_for(Peer& peer, const Message& question, Offer& offer) {
  std::string name = "region " + std::to_string(question.region_id);
  std::shared_ptr<Owned> region;
  uint32_t access = 0;
  {
    std::lock_guard lock(mutex_);
    auto found = regions_.find(question.region_id);
    if (found == regions_.end()) return failed(MC_REFUSED, name + " is not registered at the target");
    access = found->second->keys.access_of(question.secret);
    if (access == 0) return failed(MC_REFUSED, "wrong or revoked access key for " + name);
    region = found->second;
    Grant grant{region, key_from(question.secret), access};
    if (Status status = lease(peer, grant, offer.grant); !status.ok()) return status;
    offer.grant.grant = next_grant_++;
    // Before its memory is described: who withdraws it meanwhile waits for this grant too.
    peer.grants.emplace(offer.grant.grant, std::move(grant));
  }
  offer.grant.access = access;
  offer.grant.length = region->length;
  Status status = hooks_.describe(peer, *region, access, offer);
  if (!status.ok()) on_release(peer, offer.grant.grant);
  return status;
}

Status Grantor::lease(Peer& peer, Grant& grant, Message& answer) {
  if (!peer.leases) return {};
  if (!peer.free_slots.empty()) {
    grant.slot = peer.free_slots.back();
    peer.free_slots.pop_back();
  } else if (peer.slots_used < LeasePage::kSlots) {
    grant.slot = peer.slots_used++;
  } else {
    return failed(MC_UNSUPPORTED, "the connection holds as many regions as it can");
  }
  answer.slot = grant.slot;
  answer.token = peer.leases->slot(grant.slot).token();
  return {};
}

void Grantor::end_lease(Peer& peer, const Grant& grant) {
  if (!peer.leases) return;
  if (!grant.revoked) peer.leases->slot(grant.slot).revoke();  // whoever has the slot next has another token
  peer.free_slots.push_back(grant.slot);
}

void Grantor::on_release(Peer& peer, uint64_t number) {
  std::lock_guard lock(mutex_);
  auto found = peer.grants.find(number);
  if (found == peer.grants.end()) return;
  end_lease(peer, found->second);
  peer.grants.erase(found);
  released_.notify_all();
}

bool Grantor::send(const std::shared_ptr<Session>& session, const Message& message,
                   std::shared_ptr<const UniqueFd> passed) {
  Peer& peer = static_cast<Peer&>(*session);
  if (peer.closed) return false;
  if (!peer.channel->send(message, std::move(passed))) return false;
  if (peer.channel->congested()) loop_.change(peer.channel->fd(), EPOLLOUT | EPOLLRDHUP);
  return true;
}

void Grantor::hang_up(const PeerPointer& peer) {
  if (!std::exchange(peer->closed, true)) {
    strangers_ -= peer->stranger || (peer->tcp && !peer->greeted);
    loop_.forget(peer->channel->fd());
    peer->channel->shut();
    peer->state.reset();
  }
  bool holds = false;
  {
    std::lock_guard lock(mutex_);
    for (auto& [number, grant] : peer->grants) {
      if (!std::exchange(grant.revoked, true) && peer->leases) peer->leases->slot(grant.slot).revoke();
      holds = true;
    }
  }
  // Who had grants and ended without a farewell may still copy, until its process ends: the kernel tells
  // when. At another host nobody does.
  if (!holds || !peer->pidfd.valid()) gone(peer);
}

void Grantor::gone(const PeerPointer& peer) {
  if (std::exchange(peer->gone, true)) return;
  if (!peer->closed) {
    peer->closed = true;
    strangers_ -= peer->stranger || (peer->tcp && !peer->greeted);
    loop_.forget(peer->channel->fd());
    peer->channel->shut();
    peer->state.reset();
  }
  if (peer->pidfd.valid()) loop_.forget(peer->pidfd.get());
  std::lock_guard lock(mutex_);
  peer->grants.clear();
  peers_.remove(peer);
  released_.notify_all();
}

}  // namespace mooncake::driver
