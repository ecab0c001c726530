#include "target.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "support/handles.hpp"

namespace mooncake::efa {
namespace {

constexpr LinkSize kDoorSize{.transfers = 1, .sends = 16, .receives = 128};
// How long a peer may take to end what it has under a revoked key; then its session is ended.
constexpr uint64_t kPatienceNs = 1'000'000'000;
constexpr uint64_t kMostTurnedAway =
    4096;                               // each takes a place in the address table; later ones get no answer
constexpr size_t kMostNotices = 1024;   // that nobody has fetched; later ones wait with their senders
constexpr uint64_t kSilenceFactor = 2;  // initiators notice first

bool same(const Name& left, const Name& right) {
  return driver::equal_in_constant_time(left.data(), right.data(), left.size());
}

uint64_t remote_rights(uint32_t access) {
  return ((access & MC_ACCESS_READ) != 0 ? fi::kRemoteRead : 0) |
         ((access & MC_ACCESS_WRITE) != 0 ? fi::kRemoteWrite : 0);
}

}  // namespace

Status Target::open() {
  if (Status status = driver::fill_random(name_.data(), name_.size()); !status.ok()) return status;
  Status status = Link::open(shared_.fabric, kDoorSize, door_);
  if (status.ok()) door_->incoming = true;
  return status;
}

void Target::close() {
  guests_.clear();
  slots_.clear();
  links_.close_all();
  door_.reset();
  // Their owners hold on to them for longer than the fabric is there.
  for (auto& [id, region] : regions_) {
    for (const auto& grant : region->grants) shared_.fabric.deregister(grant->memory);
    shared_.fabric.deregister(region->local);
  }
  regions_.clear();
  changed_.notify_all();
}

// ---- regions

// Pinning much memory takes long, and efa has locks of its own for it. Others trust in the threading model.
std::unique_lock<std::mutex> Target::lock_to_register() {
  return shared_.fabric.is_efa() ? std::unique_lock(shared_.mutex, std::defer_lock)
                                 : std::unique_lock(shared_.mutex);
}

Status Target::add(const std::shared_ptr<Region>& region) {
  Fabric& fabric = shared_.fabric;
  auto own = std::make_unique<Grant>();
  own->number = driver::new_serial();
  own->key = driver::key_from(region->memory.key);
  own->access = driver::kAllAccess;
  std::unique_lock lock = lock_to_register();
  // The fabric's own rights are of this registration: a peer's key may end while the memory stays in use.
  if (fabric.needs_local(region->memory.kind)) {
    Status status = fabric.register_memory(region->memory, fi::kRead | fi::kWrite, region->local);
    if (!status.ok()) return status;
  }
  Status status = fabric.register_memory(region->memory, remote_rights(own->access), own->memory);
  if (!status.ok()) return status;
  region->grants.push_back(std::move(own));
  if (!lock.owns_lock()) lock.lock();
  if (regions_.emplace(region->memory.region_id, region).second) return {};
  return failed(MC_INVALID, "a region has the id " + std::to_string(region->memory.region_id) + " already");
}

Status Target::grant(Region& region, const uint8_t* key, uint32_t access) {
  if (access == 0 || (access & ~driver::kAllAccess) != 0)
    return failed(MC_INVALID, "access " + std::to_string(access) + " is not made of mc_access bits");
  auto made = std::make_unique<Grant>();
  made->number = driver::new_serial();
  made->key = driver::key_from(key);
  made->access = access;
  std::unique_lock lock = lock_to_register();
  Status status = shared_.fabric.register_memory(region.memory, remote_rights(access), made->memory);
  if (!status.ok()) return status;
  if (!lock.owns_lock()) lock.lock();
  region.grants.push_back(std::move(made));
  return {};
}

Status Target::revoke(Region& region, const uint8_t* key, uint64_t deadline_ns) {
  std::unique_lock lock(shared_.mutex);
  bool found = key == nullptr;
  for (const auto& grant : region.grants) {
    if (key != nullptr && !driver::equal_in_constant_time(grant->key.data(), key, grant->key.size()))
      continue;
    found = true;
    grant->revoked = true;
    // Who does not wait wants new operations refused at once: the fabric does it, before peers know.
    if (deadline_ns == 0) shared_.fabric.deregister(grant->memory);
    Message message;
    message.kind = Kind::kRevoked;
    message.grant = grant->number;
    for (auto& [number, guest] : guests_) {
      if (guest->grants.erase(grant->number) == 0) continue;
      if (guest->returning.empty()) guest->returning_ns = now_ns();
      guest->returning.insert(grant->number);
      send(*guest, message);
    }
  }
  if (!found) return failed(MC_INVALID, "the memory has no such key");
  close_returned();
  while (deadline_ns != 0) {
    std::vector<const Guest*> late = returning(region);
    if (late.empty()) break;
    uint64_t now = now_ns();
    if (now >= deadline_ns) {
      return failed(MC_TIMEOUT, std::to_string(late.size()) + " sessions of peers, such as that of " +
                                    late[0]->link->text_of(late[0]->address) +
                                    ", have not ended what they had in flight by the deadline");
    }
    changed_.wait_for(lock, std::chrono::nanoseconds(std::min<uint64_t>(deadline_ns - now, kPatienceNs)));
  }
  return {};
}

Status Target::withdraw(Region& region, uint64_t deadline_ns) {
  // At least a moment: deregistering always waits, and a deadline of 0 means not to.
  if (Status status = revoke(region, nullptr, std::max<uint64_t>(deadline_ns, 1)); !status.ok())
    return status;
  std::unique_lock lock(shared_.mutex);
  region.withdrawn = true;
  regions_.erase(region.memory.region_id);
  shared_.fabric.deregister(region.local);
  return {};
}

std::vector<const Target::Guest*> Target::returning(const Region& region) const {
  std::vector<const Guest*> found;
  for (const auto& [number, guest] : guests_) {
    bool holds = std::any_of(region.grants.begin(), region.grants.end(),
                             [&](const auto& grant) { return guest->returning.contains(grant->number); });
    if (holds) found.push_back(guest.get());
  }
  return found;
}

// Ends the registrations of revoked keys that nobody uses any more.
void Target::close_returned() {
  for (auto& [id, region] : regions_) {
    for (const auto& grant : region->grants) {
      if (!grant->revoked || grant->memory.handle == nullptr) continue;
      bool used = std::any_of(guests_.begin(), guests_.end(), [&](const auto& guest) {
        return guest.second->returning.contains(grant->number);
      });
      if (!used) shared_.fabric.deregister(grant->memory);
    }
  }
  changed_.notify_all();
}

// ---- messages

void Target::on_message(Link& link, const Message& message) {
  if (is_door(link)) {
    if (message.kind == Kind::kHello) on_hello(message);
    return;
  }
  auto found = guests_.find(message.to);
  if (found == guests_.end() || !same(found->second->session, message.session)) return;
  Guest& guest = *found->second;
  guest.heard_ns = now_ns();
  if (!guest.sequencer.accept(message, [&](const Message& next) { return handle(guest, next); }))
    expel(*guest.link);
}

void Target::on_hello(const Message& hello) {
  for (const auto& [number, guest] : guests_) {
    if (same(guest->session, hello.session)) return;
  }
  Status status = same(hello.key, name_)
                      ? Status{}
                      : failed(MC_REFUSED, "another process has taken the place of the one it looks for");
  if (status.ok() && hello.previous != Name{}) end_with_lock(hello.previous);
  if (status.ok()) status = welcome(hello);
  if (status.ok()) return;
  if (++refused_ <= kMostTurnedAway) turn_away(hello, status);
}

Status Target::welcome(const Message& hello) {
  auto guest = std::make_unique<Guest>();
  if (Status status = links_.take(guest->link); !status.ok()) return status;
  guest->address = {hello.address, hello.address_length};
  if (Status status = guest->link->reach(guest->address, guest->peer); !status.ok()) {
    links_.release(*guest->link, true);
    return status;
  }
  auto slot = std::find(slots_.begin(), slots_.end(), nullptr);
  if (slot == slots_.end() && slots_.size() < 1u << kSlotBits) slot = slots_.insert(slot, nullptr);
  if (slot == slots_.end()) {
    links_.release(*guest->link, true);
    return failed(MC_NO_MEMORY, "the peer has as many sessions as it can have");
  }
  guest->number = driver::new_serial();
  guest->initiator = hello.from;
  guest->next_epoch = hello.request;
  guest->slot = static_cast<uint32_t>(slot - slots_.begin());
  *slot = guest.get();
  guest->session = hello.session;
  guest->heard_ns = now_ns();
  Message answer;
  answer.kind = Kind::kWelcome;
  answer.to = hello.from;
  answer.from = guest->number;
  answer.grant = guest->slot;
  answer.session = hello.session;
  answer.address = guest->link->address().bytes;
  answer.address_length = guest->link->address().length;
  guest->link->send(guest->peer, answer);
  guests_.emplace(guest->number, std::move(guest));
  return {};
}

void Target::turn_away(const Message& hello, const Status& why) {
  fi::Address peer = fi::kAddressUnspecified;
  FabricAddress address{hello.address, hello.address_length};
  if (!door_->reach(address, peer).ok()) return;
  Message answer;
  answer.kind = Kind::kWelcome;
  answer.to = hello.from;
  answer.session = hello.session;
  answer.status = why.code;
  answer.say(why.reason);
  door_->send(peer, answer);
}

bool Target::handle(Guest& guest, const Message& message) {
  switch (message.kind) {
    case Kind::kAsk:
      on_ask(guest, message);
      return true;
    case Kind::kReleased:
      guest.returning.erase(message.grant);
      close_returned();
      return true;
    case Kind::kPing: {
      Message pong;
      pong.kind = Kind::kPong;
      send(guest, pong);
      return true;
    }
    case Kind::kNotice:
    case Kind::kNoNotice:
      on_notice(guest, message);
      return true;
    case Kind::kGoodbye: {
      Message farewell;
      farewell.kind = Kind::kFarewell;
      send(guest, farewell);
      leave(guest, false);
      return false;
    }
    case Kind::kFarewell:
      leave(guest, true);
      return false;
    default:
      expel(*guest.link);
      return false;
  }
}

void Target::on_ask(Guest& guest, const Message& question) {
  Message answer;
  answer.kind = Kind::kAnswer;
  answer.request = question.request;
  std::string why;
  Region* region = nullptr;
  if (const Grant* grant = find(question, region, why)) {
    answer.grant = grant->number;
    answer.memory_key = grant->memory.key;
    answer.base = shared_.fabric.remote_address(region->memory.address);
    answer.length = region->memory.length;
    answer.access = grant->access;
    guest.grants.insert(grant->number);
  } else {
    ++refused_;
    answer.status = MC_REFUSED;
    answer.say(why);
  }
  send(guest, answer);
}

// Compares with every key, in constant time.
const Grant* Target::find(const Message& question, Region*& region, std::string& why) {
  auto found = regions_.find(question.region);
  if (found == regions_.end()) {
    why = "there is no region with this id";
    return nullptr;
  }
  region = found->second.get();
  const Grant* opened = nullptr;
  const Grant* revoked = nullptr;
  for (const auto& grant : region->grants) {
    if (!driver::equal_in_constant_time(grant->key.data(), question.key.data(), grant->key.size())) continue;
    (grant->revoked ? revoked : opened) = grant.get();
  }
  if (opened == nullptr) why = revoked != nullptr ? "the key was revoked" : "the access key is wrong";
  return opened;
}

void Target::send(Guest& guest, Message message) {
  message.to = guest.initiator;
  message.from = guest.number;
  message.session = guest.session;
  message.sequence = guest.sequencer.next_to_send();
  guest.link->send(guest.peer, message);
}

// ---- notices

void Target::on_data(uint64_t data) {
  uint64_t slot = data >> kEpochBits;
  if (slot >= slots_.size() || slots_[slot] == nullptr) return;
  Guest& guest = *slots_[slot];
  // The epoch next to the one that is awaited whose lower bits these are.
  uint64_t epoch = guest.next_epoch + (((data & kEpochMask) - guest.next_epoch) & kEpochMask);
  ++guest.arrivals[epoch].seen;
  deliver(guest);
}

void Target::on_notice(Guest& guest, const Message& message) {
  constexpr size_t kMostEpochs = 4096;
  if (message.request < guest.next_epoch || guest.arrivals.size() > kMostEpochs) return;
  Arrival& arrival = guest.arrivals[message.request];
  arrival.announced = true;
  arrival.dropped = message.kind == Kind::kNoNotice;
  arrival.expected = message.length;
  arrival.data = {message.address, message.address_length};
  deliver(guest);
}

// In the order of the epochs: a notice stands for all writes before it.
void Target::deliver(Guest& guest) {
  while (!guest.arrivals.empty()) {
    auto first = guest.arrivals.begin();
    Arrival& arrival = first->second;
    if (first->first != guest.next_epoch || !arrival.announced) return;
    if (!arrival.dropped) {
      if (arrival.seen < arrival.expected || notices_.size() >= kMostNotices) return;
      mc_notice& notice = notices_.emplace_back();
      notice.length = arrival.data.length;
      std::memcpy(notice.data, arrival.data.bytes.data(), arrival.data.length);
      shared_.completions.signal();
      Message noticed;
      noticed.kind = Kind::kNoticed;
      noticed.request = guest.next_epoch;
      send(guest, noticed);
    }
    guest.arrivals.erase(first);
    ++guest.next_epoch;
  }
}

size_t Target::poll_notices(mc_notice* notices, size_t capacity) {
  size_t count = std::min(capacity, notices_.size());
  std::copy_n(notices_.begin(), count, notices);
  bool full = notices_.size() >= kMostNotices;
  notices_.erase(notices_.begin(), notices_.begin() + static_cast<ptrdiff_t>(count));
  if (full && count > 0) {
    for (auto& [number, guest] : guests_) deliver(*guest);
  }
  return count;
}

// ---- the end of sessions

void Target::leave(Guest& guest, bool at_once) {
  links_.release(*guest.link, at_once);
  slots_[guest.slot] = nullptr;
  guests_.erase(guest.number);
  close_returned();
}

void Target::expel(Link& link) {
  links_.close(link);
  std::erase_if(guests_, [&](const auto& guest) {
    if (guest.second->link != &link) return false;
    slots_[guest.second->slot] = nullptr;
    return true;
  });
  close_returned();
}

void Target::end_with_lock(const Name& session) {
  for (const auto& [number, guest] : guests_) {
    if (same(guest->session, session)) return expel(*guest->link);
  }
}

void Target::end(const Name& session) {
  std::lock_guard lock(shared_.mutex);
  end_with_lock(session);
}

void Target::on_lost_send(Token& token) {
  auto found = guests_.find(token.session);
  if (found != guests_.end()) expel(*found->second->link);
}

void Target::say_goodbye() {
  Message goodbye;
  goodbye.kind = Kind::kGoodbye;
  for (auto& [number, guest] : guests_) send(*guest, goodbye);
}

void Target::advance() {
  door_->flush();
  std::vector<Link*> broken;
  for (const auto& link : links_.open()) {
    if (!link->flush()) broken.push_back(link.get());
  }
  for (Link* link : broken) expel(*link);
}

void Target::tick(uint64_t now) {
  auto silence = static_cast<uint64_t>(shared_.options.dead_peer_timeout_s * 1e9) * kSilenceFactor;
  std::set<Link*> lost;
  for (const auto& [number, guest] : guests_) {
    bool holds_up = !guest->returning.empty() && passed(guest->returning_ns, now) > kPatienceNs;
    if (holds_up || passed(guest->heard_ns, now) > silence) lost.insert(guest->link);
  }
  for (Link* link : lost) expel(*link);
  links_.tick(now);
}

}  // namespace mooncake::efa
