// How ranks come into a group and are taken out of it.
#include <algorithm>

#include "group.hpp"

namespace mooncake::ep::pg {

namespace {

constexpr uint64_t kFoundSignature = 1, kAdmitSignature = 2, kJoinSignature = 3, kExpelSignature = 4;

uint64_t signature_of(uint64_t kind, const std::vector<int>& ranks) {
  uint64_t hash = kind;
  for (int rank : ranks) hash = (hash ^ static_cast<uint64_t>(rank)) * 0x9e3779b97f4a7c15u;
  return hash;
}

}  // namespace

void Group::found(const std::vector<int>& ranks, const Wait& wait) {
  drop([](int) { return true; });
  for (int rank : ranks) {
    uint64_t claim = control_.place(rank).claim.load();
    if (rank != rank_) open_peer(rank, claim);
    become_member(rank, Claim::incarnation(claim));
  }
  control_.place(rank_).activation.store(Activation::make(incarnation_[rank_], 0));
  uint64_t untouched = 0;
  if (!control_.words(rank_).state.compare_exchange_strong(untouched,
                                                           State::make(incarnation_[rank_], false, 0))) {
    evicted();
  }
  spins_ = spins_for(members_.size());
  joined_ = true;
  round(kFoundSignature, wait);
}

std::vector<int> Group::admit(const std::vector<int>& ranks, const Wait& wait) {
  int half = next_half();
  auto* offered = reinterpret_cast<uint64_t*>(input(rank_, half));
  for (size_t i = 0; i < ranks.size(); ++i) {
    uint64_t claim = control_.place(ranks[i]).claim.load();
    offered[i] = waits(ranks[i]) && open_peer(ranks[i], claim) ? Claim::incarnation(claim) : 0;
  }
  auto contributors = round(signature_of(kAdmitSignature, ranks), wait);
  std::vector<int> admitted;
  for (size_t i = 0; i < ranks.size(); ++i) {
    uint64_t incarnation = reinterpret_cast<uint64_t*>(input(contributors.front(), half))[i];
    bool agreed = std::all_of(contributors.begin(), contributors.end(), [&](int member) {
      return reinterpret_cast<uint64_t*>(input(member, half))[i] == incarnation;
    });
    if (!agreed || incarnation == 0) continue;
    become_member(ranks[i], incarnation);
    admitted.push_back(ranks[i]);
  }
  still_in();
  if (admitted.empty()) return admitted;
  spins_ = spins_for(members_.size());
  write_activations(admitted);
  operations_ = 0;
  round(kJoinSignature, wait);
  return admitted;
}

void Group::write_activations(const std::vector<int>& ranks) {
  uint64_t bits[kRankWords] = {};
  for (int member : members_) bits[member / 64] |= uint64_t{1} << (member % 64);
  for (size_t word = 0; word < rank_words_; ++word) control_.header().snapshot[word].store(bits[word]);
  for (int rank : ranks) control_.place(rank).activation.store(Activation::make(incarnation_[rank], seq_));
  Waiter::ring(control_);
}

void Group::expel(const std::vector<int>& ranks, const Wait& wait) {
  auto named = [&](int member) { return std::find(ranks.begin(), ranks.end(), member) != ranks.end(); };
  if (named(rank_)) {
    leave();
    evicted();
  }
  next_half();
  ++seq_;
  publish(kExpelSignature);
  for (int member : members_) {
    if (named(member)) suspect(member);
  }
  collect(wait);
  for (int member : members_) {
    if (named(member)) fence(member);
  }
  drop([&](int member) { return named(member) || look(member) == Arrival::kEvicted; });
  spins_ = spins_for(members_.size());
  check_signatures(kExpelSignature);
}

void Group::join(const Wait& wait) {
  if (joined_) {
    leave();
    joined_ = false;
    drop([this](int member) { return member != rank_; });
  }
  claim();
  auto& activation = control_.place(rank_).activation;
  auto activated = [&] { return Activation::incarnation(activation.load()) == incarnation_[rank_]; };
  Waiter waiter(control_, rank_, spins_, wait.interrupted);
  while (!activated()) {
    if (waiter.pause(activated) && driver::now_ns() > wait.deadline_ns) {
      throw Stop(Code::kTimeout, "no member let rank " + std::to_string(rank_) +
                                     " in; every member has to call recover_ranks([" + std::to_string(rank_) +
                                     "])");
    }
  }
  faults_.at(Point::kBeforeJoin);
  read_snapshot();
  auto& state = control_.words(rank_).state;
  uint64_t found = state.load();
  if (arrival(found, incarnation_[rank_], seq_) != Arrival::kWaiting ||
      !state.compare_exchange_strong(found, State::make(incarnation_[rank_], false, seq_))) {
    evicted();
  }
  joined_ = true;
  operations_ = 0;
  round(kJoinSignature, wait);
}

void Group::read_snapshot() {
  seq_ = Activation::seq(control_.place(rank_).activation.load());
  drop([](int) { return true; });
  for (int rank = 0; rank < capacity(); ++rank) {
    if ((control_.header().snapshot[rank / 64].load() >> (rank % 64) & 1) == 0) continue;
    uint64_t claim = control_.place(rank).claim.load();
    uint64_t incarnation = Activation::incarnation(control_.place(rank).activation.load());
    if (rank != rank_) {
      std::unique_lock lock(places_);
      peers_[rank] = Peer();
      lock.unlock();
      if (Claim::incarnation(claim) == incarnation) open_peer(rank, claim);
    }
    become_member(rank, incarnation);
  }
  spins_ = spins_for(members_.size());
}

}  // namespace mooncake::ep::pg
