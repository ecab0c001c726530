#include "messages.hpp"

#include <algorithm>
#include <cstring>
#include <string>

namespace mooncake::ep::pg {

namespace {

constexpr uint64_t kAlign = 8;
uint64_t padded(uint64_t nbytes) { return (nbytes + kAlign - 1) / kAlign * kAlign; }
uint64_t tagged(uint64_t incarnation, uint64_t count) { return (incarnation << 48) | count; }

std::string size_text(int from, uint64_t sent, uint64_t expected) {
  return "rank " + std::to_string(from) + " sent " + std::to_string(sent) + " bytes where " +
         std::to_string(expected) + " are expected; both sides must give tensors of one size";
}

}  // namespace

Messages::Messages(Group& group)
    : group_(group), mutex_(group.places()), pairs_(static_cast<size_t>(group.capacity())) {}

Counter& Messages::produced_by(int from, int to) {
  auto* counters = reinterpret_cast<Counter*>(group_.peer(from).base() + group_.layout().produced());
  return counters[to];
}

Counter& Messages::consumed_by(int to, int from) {
  auto* counters = reinterpret_cast<Counter*>(group_.peer(to).base() + group_.layout().consumed());
  return counters[from];
}

uint64_t Messages::count(uint64_t value, uint64_t incarnation) {
  return (value >> 48) == (incarnation & 0xffff) ? value & State::kSeqMask : 0;
}

uint8_t* Messages::ring(int from, int to) {
  const Layout& layout = group_.layout();
  return group_.peer(from).base() + layout.rings() + static_cast<uint64_t>(to) * layout.ring_nbytes;
}

void Messages::copy_in(int to, uint64_t at, const void* data, uint64_t nbytes) {
  uint64_t size = group_.layout().ring_nbytes, begin = at % size, first = std::min(nbytes, size - begin);
  uint8_t* place = ring(group_.rank(), to);
  std::memcpy(place + begin, data, first);
  std::memcpy(place, static_cast<const uint8_t*>(data) + first, nbytes - first);
}

void Messages::copy_out(int from, uint64_t at, void* data, uint64_t nbytes) {
  uint64_t size = group_.layout().ring_nbytes, begin = at % size, first = std::min(nbytes, size - begin);
  const uint8_t* place = ring(from, group_.rank());
  std::memcpy(data, place + begin, first);
  std::memcpy(static_cast<uint8_t*>(data) + first, place, nbytes - first);
}

uint64_t Messages::send(int to, const uint8_t* data, uint64_t nbytes, int64_t tag) {
  std::lock_guard lock(mutex_);
  pairs_[to].sends.push_back({next_, data, {nbytes, tag}});
  if (std::find(busy_.begin(), busy_.end(), to) == busy_.end()) busy_.push_back(to);
  ++open_;
  uint64_t number = next_++;
  push(to);
  return number;
}

uint64_t Messages::receive(int from, uint8_t* data, uint64_t nbytes, int64_t tag) {
  std::lock_guard lock(mutex_);
  Receive receive{next_++, from, data, nbytes, tag};
  ++open_;
  if (!deliver_kept(receive)) receives_.push_back(receive);
  return receive.number;
}

// True if a message that came before fits; copies it.
bool Messages::deliver_kept(Receive& receive) {
  for (int from = 0; from < group_.capacity(); ++from) {
    if (receive.from != kAnySource && receive.from != from) continue;
    auto& kept = pairs_[from].kept;
    auto found =
        std::find_if(kept.begin(), kept.end(), [&](const Kept& one) { return one.tag == receive.tag; });
    if (found == kept.end() || !found->whole) continue;
    Result result{Code::kDone, "", {}, from};
    if (found->bytes.size() == receive.nbytes) {
      std::memcpy(receive.data, found->bytes.data(), receive.nbytes);
    } else {
      result.code = Code::kMismatch;
      result.reason = size_text(from, found->bytes.size(), receive.nbytes);
    }
    kept.erase(found);
    finish(receive.number, std::move(result));
    return true;
  }
  return false;
}

void Messages::finish(uint64_t number, Result result) {
  finished_.emplace(number, std::move(result));
  --open_;
}

// Counts of another incarnation mean nothing: both sides begin at zero.
void Messages::renew(int rank) {
  Pair& pair = pairs_[rank];
  uint64_t mine = group_.incarnation(group_.rank()), theirs = group_.incarnation(rank);
  if (pair.mine == mine && pair.theirs == theirs) return;
  pair.mine = mine;
  pair.theirs = theirs;
  pair.produced = pair.consumed = 0;
  pair.incoming = {};
  pair.kept.clear();
  for (Send& send : pair.sends) send.moved = 0;
}

bool Messages::push(int to) {
  renew(to);
  Pair& pair = pairs_[to];
  if (pair.sends.empty() || !group_.peer(to).mapped()) return false;
  uint64_t size = group_.layout().ring_nbytes;
  uint64_t consumed = count(consumed_by(to, group_.rank()).value.load(std::memory_order_acquire), pair.mine);
  uint64_t room = size - (pair.produced - consumed), before = pair.produced;
  while (!pair.sends.empty()) {
    Send& send = pair.sends.front();
    if (send.moved == 0) {
      if (room < sizeof(Header)) break;
      copy_in(to, pair.produced, &send.header, sizeof(Header));
      send.moved = sizeof(Header);
      pair.produced += sizeof(Header);
      room -= sizeof(Header);
    }
    uint64_t left = send.header.nbytes - (send.moved - sizeof(Header));
    uint64_t part = std::min(left, room / kAlign * kAlign);
    copy_in(to, pair.produced, send.data + send.moved - sizeof(Header), part);
    send.moved += part;
    pair.produced += padded(part);
    room -= std::min(room, padded(part));
    if (part < left) break;
    finish(send.number, {});
    pair.sends.pop_front();
  }
  if (pair.produced == before) return false;
  produced_by(group_.rank(), to)
      .value.store(tagged(pair.theirs & 0xffff, pair.produced), std::memory_order_seq_cst);
  return true;
}

bool Messages::wanted(int from) const {
  return std::any_of(receives_.begin(), receives_.end(),
                     [from](const Receive& one) { return one.from == from || one.from == kAnySource; });
}

std::list<Messages::Receive>::iterator Messages::find_receive(int from, int64_t tag) {
  return std::find_if(receives_.begin(), receives_.end(), [&](const Receive& one) {
    return (one.from == from || one.from == kAnySource) && one.tag == tag;
  });
}

void Messages::accept(int from, const Receive& receive, const Header& header, Incoming& incoming) {
  incoming.receive = receive;
  incoming.direct = header.nbytes == receive.nbytes;
  if (incoming.direct) return;
  finish(receive.number, {Code::kMismatch, size_text(from, header.nbytes, receive.nbytes), {}, from});
}

bool Messages::begin(int from, Pair& pair, uint64_t available) {
  if (available < sizeof(Header) || !wanted(from)) return false;
  Incoming& incoming = pair.incoming;
  incoming = {};
  copy_out(from, pair.consumed, &incoming.header, sizeof(Header));
  pair.consumed += sizeof(Header);
  incoming.active = true;
  auto found = find_receive(from, incoming.header.tag);
  incoming.kept = pair.kept.end();
  if (found != receives_.end()) {
    accept(from, *found, incoming.header, incoming);
    receives_.erase(found);
  } else {
    Kept kept{std::vector<uint8_t>(incoming.header.nbytes), incoming.header.tag};
    incoming.kept = pair.kept.insert(pair.kept.end(), std::move(kept));
  }
  return true;
}

bool Messages::pull(int from) {
  renew(from);
  Pair& pair = pairs_[from];
  if (!group_.peer(from).mapped()) return false;
  uint64_t produced =
      count(produced_by(from, group_.rank()).value.load(std::memory_order_acquire), pair.mine);
  uint64_t before = pair.consumed;
  Incoming& incoming = pair.incoming;
  while (produced > pair.consumed || (incoming.active && incoming.moved == incoming.header.nbytes)) {
    if (!incoming.active && !begin(from, pair, produced - pair.consumed)) break;
    uint64_t part = std::min(incoming.header.nbytes - incoming.moved, produced - pair.consumed);
    if (incoming.direct) {
      copy_out(from, pair.consumed, incoming.receive.data + incoming.moved, part);
    } else if (incoming.kept != pair.kept.end()) {
      copy_out(from, pair.consumed, incoming.kept->bytes.data() + incoming.moved, part);
    }
    incoming.moved += part;
    pair.consumed += padded(part);
    if (incoming.moved < incoming.header.nbytes) break;
    incoming.active = false;
    if (incoming.direct) {
      finish(incoming.receive.number, {Code::kDone, "", {}, from});
    } else if (incoming.kept != pair.kept.end()) {
      incoming.kept->whole = true;
      auto found = find_receive(from, incoming.kept->tag);
      if (found != receives_.end() && deliver_kept(*found)) receives_.erase(found);
    }
  }
  if (pair.consumed == before) return false;
  consumed_by(group_.rank(), from)
      .value.store(tagged(pair.theirs & 0xffff, pair.consumed), std::memory_order_seq_cst);
  return true;
}

bool Messages::progress() {
  std::lock_guard lock(mutex_);
  bool moved = false;
  for (int to : busy_) moved |= push(to);
  std::erase_if(busy_, [this](int to) { return pairs_[to].sends.empty(); });
  for (int from = 0; from < group_.capacity(); ++from) {
    if (pairs_[from].incoming.active || wanted(from)) moved |= pull(from);
  }
  if (moved) ring_sleepers(group_.control(), group_.rank_words());
  return moved;
}

void Messages::bury() {
  std::lock_guard lock(mutex_);
  auto lost = [](int rank) {
    return Result{Code::kRankFailed, "rank " + std::to_string(rank) + " is gone, or was evicted", {}, -1};
  };
  for (int rank = 0; rank < group_.capacity(); ++rank) {
    Pair& pair = pairs_[rank];
    bool receiving = pair.incoming.active && pair.incoming.direct;
    bool asked =
        std::any_of(receives_.begin(), receives_.end(), [rank](auto& one) { return one.from == rank; });
    if ((pair.sends.empty() && !receiving && !asked) || !group_.gone(rank)) continue;
    // What it had sent to the end before is still there.
    while (pull(rank)) continue;
    for (Send& send : pair.sends) finish(send.number, lost(rank));
    pair.sends.clear();
    if (pair.incoming.active && pair.incoming.direct) finish(pair.incoming.receive.number, lost(rank));
    pair.incoming = {};
    std::erase_if(receives_, [&](const Receive& one) {
      if (one.from != rank) return false;
      finish(one.number, lost(rank));
      return true;
    });
  }
  bool any =
      std::any_of(receives_.begin(), receives_.end(), [](auto& one) { return one.from == kAnySource; });
  if (!any) return;
  for (int rank = 0; rank < group_.capacity(); ++rank) {
    if (rank != group_.rank() && !group_.gone(rank)) return;
  }
  std::erase_if(receives_, [&](const Receive& one) {
    if (one.from != kAnySource) return false;
    finish(one.number, {Code::kRankFailed, "every other rank is gone", {}, -1});
    return true;
  });
}

bool Messages::idle() {
  std::lock_guard lock(mutex_);
  return open_ == 0;
}

bool Messages::done(uint64_t number) {
  std::lock_guard lock(mutex_);
  return finished_.count(number) != 0;
}

Result Messages::take(uint64_t number) {
  std::lock_guard lock(mutex_);
  auto found = finished_.find(number);
  if (found == finished_.end())
    return {Code::kInvalid, "message " + std::to_string(number) + " is unknown", {}, -1};
  Result result = std::move(found->second);
  finished_.erase(found);
  return result;
}

void Messages::give_up(uint64_t number) {
  std::lock_guard lock(mutex_);
  for (Pair& pair : pairs_) {
    Incoming& incoming = pair.incoming;
    if (incoming.active && incoming.direct && incoming.receive.number == number)
      incoming.direct = false, --open_;
    for (auto send = pair.sends.begin(); send != pair.sends.end(); ++send) {
      if (send->number != number || send->moved != 0) continue;
      pair.sends.erase(send);
      --open_;
      break;
    }
  }
  open_ -= std::erase_if(receives_, [number](const Receive& one) { return one.number == number; });
}

void Messages::reset() {
  std::lock_guard lock(mutex_);
  for (int rank = 0; rank < group_.capacity(); ++rank) {
    produced_by(group_.rank(), rank).value.store(0);
    consumed_by(group_.rank(), rank).value.store(0);
  }
}

}  // namespace mooncake::ep::pg
