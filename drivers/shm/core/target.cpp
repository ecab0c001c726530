#include "target.hpp"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
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

// How soon to look again whether a peer that was turned away has left off copying.
constexpr uint64_t kLastCopyNs = 20'000'000;

const std::atomic<bool> kNobodyGone{false};

// Every key is compared, each in constant time: the answer's delay tells nothing but how many there are.
const RegionKey* find_key(const Region& region, const uint8_t* secret) {
  const RegionKey* found = nullptr;
  for (const RegionKey& known : region.keys) {
    if (equal_in_constant_time(secret, known.key.data(), known.key.size())) found = &known;
  }
  return found;
}

// A second file description of a memfd, without the right to write. The mode keeps other users from opening
// the file anew with that right.
Status open_read_only(const UniqueFd& fd, std::shared_ptr<const UniqueFd>& read_only) {
  if (fchmod(fd.get(), S_IRUSR | S_IWUSR) != 0)
    return system_failure(MC_IO, "cannot restrict the mode of the memory's file", errno);
  std::string path = "/proc/self/fd/" + std::to_string(fd.get());
  UniqueFd made(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!made.valid()) return system_failure(MC_IO, "cannot open the memory's file for reading only", errno);
  read_only = std::make_shared<const UniqueFd>(std::move(made));
  return {};
}

// `pid` is that of one of the peers.
Status still_in_flight(bool own, size_t peers, pid_t pid) {
  std::string whose = own ? "this side" : "";
  if (own && peers != 0) whose += " and of ";
  if (peers != 0) {
    whose += std::to_string(peers) + " connections of peers, such as that of " +
             (pid != 0 ? "process " + std::to_string(pid) : "a process of another pid namespace");
  }
  return failed(MC_TIMEOUT, "operations of " + whose + " were still in flight at the deadline");
}

}  // namespace

Status Target::listen() {
  if (Status status = LifeSign::create(life_, life_fd_); !status.ok()) return status;
  UniqueFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (!socket.valid()) return system_failure(MC_IO, "cannot create the listening socket", errno);
  sockaddr_un name;
  socklen_t length = socket_name(address_, name);
  if (bind(socket.get(), reinterpret_cast<sockaddr*>(&name), length) != 0 ||
      ::listen(socket.get(), kBacklog) != 0) {
    return system_failure(MC_IO, "cannot listen on an abstract socket", errno);
  }
  listener_ = std::move(socket);
  loop_.post([this] {
    life_->hold();  // before the first peer can be welcomed
    loop_.watch(listener_.get(), EPOLLIN, [this](uint32_t) { on_listener(); });
  });
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
  if (life_) life_->resign();
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
    revoke_grants(region->id, nullptr, holders);
  }
  bool idle = region->own_use.wait_idle(deadline_ns, kNobodyGone);
  std::vector<PeerPointer> busy = wait_for(holders, deadline_ns);
  if (!idle || !busy.empty()) return still_in_flight(!idle, busy.size(), busy.empty() ? 0 : busy[0]->pid);
  std::lock_guard lock(mutex_);
  release_grants(region->id, nullptr);
  return {};
}

Status Target::grant(const std::shared_ptr<Region>& region, const Key& key, uint32_t access) {
  if (access == 0 || (access & ~kAllAccess) != 0)
    return failed(MC_INVALID, "a key must allow reading, writing or both");
  std::lock_guard lock(mutex_);
  if (region->withdrawn.load()) return failed(MC_INVALID, "the memory is being deregistered");
  if (find_key(*region, key.data()) != nullptr)
    return failed(MC_INVALID, "the region has this key already, and no key may be used twice");
  if (access == MC_ACCESS_READ && region->fd && !region->read_only_fd) {
    if (Status status = open_read_only(*region->fd, region->read_only_fd); !status.ok()) return status;
  }
  region->keys.push_back({key, access, false});
  return {};
}

Status Target::revoke(const std::shared_ptr<Region>& region, const uint8_t* key, uint64_t deadline_ns) {
  std::vector<Holder> holders;
  Key name{};
  if (key != nullptr) name = driver::key_from(key);
  {
    std::lock_guard lock(mutex_);
    if (key != nullptr && find_key(*region, key) == nullptr)
      return failed(MC_INVALID, "the region never had this key");
    for (RegionKey& known : region->keys) {
      if (key == nullptr || known.key == name) known.revoked = true;
    }
    revoke_grants(region->id, key == nullptr ? nullptr : &name, holders);
  }
  if (deadline_ns == 0) return {};
  std::vector<PeerPointer> busy = wait_for(holders, deadline_ns);
  if (!busy.empty()) return still_in_flight(false, busy.size(), busy[0]->pid);
  std::lock_guard lock(mutex_);
  release_grants(region->id, key == nullptr ? nullptr : &name);
  return {};
}

std::vector<Target::PeerPointer> Target::wait_for(const std::vector<Holder>& holders, uint64_t deadline_ns) {
  std::vector<PeerPointer> busy;  // the holders of one peer are next to one another
  for (const Holder& holder : holders) {
    bool idle = holder.peer->leases->slot(holder.slot).wait_idle(deadline_ns, holder.peer->gone);
    if (!idle && (busy.empty() || busy.back() != holder.peer)) busy.push_back(holder.peer);
  }
  return busy;
}

void Target::revoke_grants(uint64_t region_id, const Key* key, std::vector<Holder>& holders) {
  for (const PeerPointer& peer : peers_) {
    for (auto next = peer->grants.lower_bound({region_id, Key{}});
         next != peer->grants.end() && next->first.first == region_id; ++next) {
      if (key != nullptr && next->first.second != *key) continue;
      Grant& grant = next->second;
      holders.push_back({peer, grant.slot});
      if (std::exchange(grant.revoked, true)) continue;
      peer->leases->slot(grant.slot).revoke();
      loop_.post([this, peer, name = next->first] {
        Message notice = make_message(MessageKind::kRevoke);
        notice.region_id = name.first;
        std::memcpy(notice.secret, name.second.data(), name.second.size());
        if (!send(peer, notice)) turn_away(peer);
      });
    }
  }
}

void Target::release_grants(uint64_t region_id, const Key* key) {
  for (const PeerPointer& peer : peers_) {
    std::erase_if(peer->grants, [&](const auto& item) {
      const auto& [name, grant] = item;
      bool meant = name.first == region_id && (key == nullptr || name.second == *key) && grant.revoked;
      if (meant) peer->free_slots.push_back(grant.slot);
      return meant;
    });
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
  peer->pid = who.pid;
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
    if (late && !late->greeted) turn_away(late);
  });
}

void Target::on_event(const PeerPointer& peer, uint32_t epoll_events) {
  if ((epoll_events & EPOLLOUT) != 0) {
    if (!peer->channel->flush()) return turn_away(peer);
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
    if (received == Channel::Received::kEnd) return drop(peer);
    if (received == Channel::Received::kGarbage || !on_message(peer, message)) return turn_away(peer);
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
  if (!send(peer, make_message(MessageKind::kDriver), life_fd_)) return false;
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
  Status status = answer_for(*peer, question, answer, fd);
  if (status.code == MC_REFUSED) refused_.fetch_add(1, std::memory_order_relaxed);
  set_reason(answer, status);
  return send(peer, answer, std::move(fd));
}

Status Target::answer_for(Peer& peer, const Message& question, Message& answer,
                          std::shared_ptr<const UniqueFd>& fd) {
  std::string region_name = "region " + std::to_string(question.region_id);
  std::lock_guard lock(mutex_);
  auto found = regions_.find(question.region_id);
  if (found == regions_.end()) return failed(MC_REFUSED, region_name + " is not registered at the target");
  const Region& region = *found->second;
  const RegionKey* key = find_key(region, question.secret);
  if (key == nullptr) return failed(MC_REFUSED, "wrong access key for " + region_name);
  if (key->revoked) return failed(MC_REFUSED, "the access key for " + region_name + " was revoked");
  Grant grant{};
  if (Status status = lease(peer, {region.id, key->key}, grant); !status.ok()) return status;
  answer.slot = grant.slot;
  answer.token = grant.token;
  answer.access = key->access;
  answer.length = region.length;
  put_body(answer, GrantBody{region.fd ? AccessMode::kMapped : AccessMode::kProcessVm, 0,
                             reinterpret_cast<uint64_t>(region.base), region.fd_offset});
  fd = key->access == MC_ACCESS_READ ? region.read_only_fd : region.fd;
  return {};
}

// Keys that were revoked without waiting keep their slots until these are needed.
void Target::reclaim(Peer& peer) {
  std::erase_if(peer.grants, [&](const auto& item) {
    const Grant& grant = item.second;
    bool over = grant.revoked && peer.leases->slot(grant.slot).idle();
    if (over) peer.free_slots.push_back(grant.slot);
    return over;
  });
}

Status Target::lease(Peer& peer, const std::pair<uint64_t, Key>& name, Grant& grant) {
  auto known = peer.grants.find(name);
  if (known == peer.grants.end()) {
    uint32_t slot = peer.slots_used;
    if (slot == LeasePage::kSlots && peer.free_slots.empty()) reclaim(peer);
    if (!peer.free_slots.empty()) {
      slot = peer.free_slots.back();
      peer.free_slots.pop_back();
    } else if (slot < LeasePage::kSlots) {
      ++peer.slots_used;
    } else {
      return failed(MC_UNSUPPORTED, "the connection holds as many regions as it can");
    }
    known = peer.grants.emplace(name, Grant{slot, peer.leases->slot(slot).token(), false}).first;
  }
  grant = known->second;
  return {};
}

bool Target::send(const PeerPointer& peer, const Message& message, std::shared_ptr<const UniqueFd> passed) {
  if (peer->gone.load() || peer->turned_away) return false;
  if (!peer->channel->send(message, std::move(passed))) return false;
  if (peer->channel->congested()) loop_.change(peer->channel->fd(), EPOLLOUT | EPOLLRDHUP);
  return true;
}

void Target::drop(const PeerPointer& peer) {
  if (peer->gone.exchange(true)) return;
  if (!peer->turned_away) {
    strangers_ -= peer->stranger;
    loop_.forget(peer->channel->fd());
  }
  if (peer->pidfd.valid()) loop_.forget(peer->pidfd.get());
  peer->channel->shut();
  std::lock_guard lock(mutex_);
  peers_.remove(peer);
}

void Target::turn_away(const PeerPointer& peer) {
  if (peer->gone.load() || std::exchange(peer->turned_away, true)) return;
  strangers_ -= peer->stranger;
  loop_.forget(peer->channel->fd());
  // Before its leases end, so that it takes the end of one for the end of the connection.
  peer->channel->shut();
  {
    std::lock_guard lock(mutex_);
    for (auto& [name, grant] : peer->grants) {
      if (!std::exchange(grant.revoked, true)) peer->leases->slot(grant.slot).revoke();
    }
  }
  wait_for_last_copy(peer);
}

void Target::wait_for_last_copy(const PeerPointer& peer) {
  if (peer->gone.load()) return;
  bool idle = true;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [name, grant] : peer->grants) idle = idle && peer->leases->slot(grant.slot).idle();
  }
  if (idle) return drop(peer);
  loop_.at(now_ns() + kLastCopyNs, [this, peer] { wait_for_last_copy(peer); });
}

}  // namespace mooncake::shm
