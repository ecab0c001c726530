#include "group.hpp"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <stdexcept>

namespace mooncake::ep::pg {

namespace {

SharedMemory new_block(uint32_t capacity) {
  if (capacity < 1 || capacity > kMaxRanks) {
    throw std::runtime_error("a group of up to " + std::to_string(capacity) + " ranks; there may be 1 to " +
                             std::to_string(kMaxRanks));
  }
  auto block = SharedMemory::create("mooncake-pg-control", Control::nbytes(capacity));
  auto* header = new (block.data()) ControlHeader{};
  header->capacity = capacity;
  auto status = driver::fill_random(&header->group_id, sizeof header->group_id);
  if (!status.ok()) throw std::runtime_error(status.reason);
  header->magic = kControlMagic;
  return block;
}

}  // namespace

Group::Group(uint32_t capacity, int rank, int pid, int fd)
    : rank_(rank), block_(pid == 0 ? new_block(capacity) : SharedMemory::open(pid, fd)) {
  control_.base = block_.data();
  if (control_.header().magic != kControlMagic) throw std::runtime_error("this is not the memory of a group");
  capacity = control_.header().capacity;
  if (rank < 0 || rank >= static_cast<int>(capacity)) {
    throw std::runtime_error("rank " + std::to_string(rank) + " is outside of a group of up to " +
                             std::to_string(capacity) + " ranks; set max_group_size where the group is made");
  }
  layout_ = Layout::of(capacity);
  peers_.resize(capacity);
  incarnation_.resize(capacity);
  rank_words_ = (capacity + 63) / 64;
  spins_ = spins_for(1);
  peers_[rank] = Peer::own(control_.header().group_id, layout_);
  members_ = {rank};
}

void Group::claim() {
  auto& place = control_.place(rank_);
  uint64_t found = place.claim.load(), mine = 0;
  do {
    uint64_t incarnation = Claim::incarnation(found) + 1;
    if (incarnation >> 15 != 0)
      throw std::runtime_error("rank " + std::to_string(rank_) + " came back too often");
    mine = Claim::make(incarnation, getpid(), peers_[rank_].memory().fd(), true);
    peers_[rank_].header().claim = mine;
  } while (!place.claim.compare_exchange_strong(found, mine));
  std::lock_guard lock(places_);
  incarnation_[rank_] = Claim::incarnation(mine);
}

bool Group::waits(int rank) const {
  uint64_t claim = control_.place(rank).claim.load();
  bool member = std::find(members_.begin(), members_.end(), rank) != members_.end();
  return !member && Claim::ready(claim) && Claim::incarnation(claim) > incarnation_[rank];
}

bool Group::claimed(const std::vector<int>& ranks) const {
  return std::all_of(ranks.begin(), ranks.end(),
                     [this](int rank) { return Claim::ready(control_.place(rank).claim.load()); });
}

bool Group::open_peer(int rank, uint64_t claim) {
  if (rank == rank_) return true;
  try {
    Peer opened = Peer::open(control_.header().group_id, claim);
    std::lock_guard lock(places_);
    peers_[rank] = std::move(opened);
    return true;
  } catch (const std::runtime_error&) {
    // Gone already. It cannot publish a round with data, because that takes this rank's word first.
    return false;
  }
}

void Group::become_member(int rank, uint64_t incarnation) {
  std::lock_guard lock(places_);
  incarnation_[rank] = incarnation;
  auto at = std::lower_bound(members_.begin(), members_.end(), rank);
  if (at == members_.end() || *at != rank) members_.insert(at, rank);
}

void Group::publish(uint64_t signature) {
  auto& words = control_.words(rank_);
  uint64_t incarnation = incarnation_[rank_];
  words.signature[seq_ & 1].store(signature, std::memory_order_relaxed);
  uint64_t before = State::make(incarnation, false, seq_ - 1);
  if (!words.state.compare_exchange_strong(before, State::make(incarnation, false, seq_))) evicted();
  ring_sleepers(control_, rank_words_);
}

const std::vector<int>& Group::round(uint64_t signature, const Wait& wait) {
  if (!joined_) return members_;
  ++seq_;
  faults_.at(Point::kBeforePublish);
  publish(signature);
  faults_.at(Point::kAfterPublish);
  if (collect(wait)) {
    drop([this](int member) { return look(member) == Arrival::kEvicted; });
    spins_ = spins_for(members_.size());
  }
  check_signatures(signature);
  return members_;
}

bool Group::collect(const Wait& wait) {
  bool lost = false;
  for (int member : members_) {
    if (member == rank_) continue;
    if (look(member) == Arrival::kWaiting) wait_for(member, wait);
    lost |= look(member) == Arrival::kEvicted;
  }
  return lost;
}

void Group::wait_for(int member, const Wait& wait) {
  Waiter waiter(control_, rank_, spins_, wait.interrupted);
  auto arrived = [&] { return look(member) != Arrival::kWaiting; };
  try {
    while (!arrived()) {
      if (!waiter.pause(arrived)) continue;
      if (peers_[member].dead() || !peers_[member].mapped() || driver::now_ns() > wait.deadline_ns) {
        suspect(member);
      }
    }
  } catch (const Stop&) {
    leave();
    throw;
  }
}

void Group::suspect(int rank) {
  auto& state = control_.words(rank).state;
  uint64_t found = state.load();
  while (arrival(found, incarnation_[rank], seq_) == Arrival::kWaiting) {
    if (state.compare_exchange_weak(found, State::make(incarnation_[rank], true, seq_ - 1))) break;
  }
  ring_sleepers(control_, rank_words_);
}

void Group::check_signatures(uint64_t signature) const {
  for (int member : members_) {
    uint64_t theirs = control_.words(member).signature[seq_ & 1].load(std::memory_order_relaxed);
    if (theirs == signature) continue;
    throw Stop(Code::kMismatch,
               "rank " + std::to_string(member) +
                   " called another collective, or this one with another size, type or root, "
                   "than rank " +
                   std::to_string(rank_) + "; all ranks must call the same collectives in the same order");
  }
}

void Group::still_in() const {
  if (!joined_) return;
  uint64_t word = control_.words(rank_).state.load();
  if (State::evicted(word) || State::incarnation(word) != incarnation_[rank_]) evicted();
}

void Group::evicted() const {
  throw Stop(Code::kEvicted, "rank " + std::to_string(rank_) +
                                 " was too late: the others evicted it and go on without it; "
                                 "join_group() waits until they take it back by recover_ranks()");
}

std::vector<int> Group::copy_of_members() {
  std::lock_guard lock(places_);
  return members_;
}

void Group::fence(int rank) {
  auto& state = control_.words(rank).state;
  uint64_t found = state.load();
  while (State::incarnation(found) == incarnation_[rank] && !State::evicted(found)) {
    if (state.compare_exchange_weak(found, found | State::kEvicted)) break;
  }
  ring_sleepers(control_, rank_words_);
}

bool Group::gone(int rank) const {
  uint64_t word = control_.words(rank).state.load();
  if (State::incarnation(word) == incarnation_[rank] && State::evicted(word)) return true;
  return incarnation_[rank] == 0 || peers_[rank].dead();
}

}  // namespace mooncake::ep::pg
