#include <algorithm>

#include "eplb_state.hpp"

namespace mooncake::ep {

namespace {

// A change of one or two slots. `other` gets `expert`; in an exchange, `slot` gets what stood in `other`.
struct Step {
  double gain = 0;  // of the sum of squared loads, for each slot that changes
  size_t slot = 0, other = 0;
  int64_t expert = kEmpty;
  bool exchange = false;
};

double squares(double before, double change) { return -change * (2 * before + change); }

// The best step that makes the heaviest rank lighter and no other rank as heavy.
class Search {
 public:
  explicit Search(const Placement& placement)
      : placement_(placement), heavy_(placement.heaviest_rank()), most_(placement.heaviest()) {
    for (size_t slot : placement.live_slots()) {
      int64_t expert = placement.expert_at(slot);
      if (expert == kEmpty) continue;
      size_t rank = placement.rank_of(slot);
      if (ranks_.empty() || ranks_.back().rank != rank) {
        ranks_.push_back({placement.rank_load(rank), rank, slots_.size(), slots_.size()});
      }
      ++ranks_.back().end;
      slots_.push_back(weigh(slot, rank, expert));
    }
    std::sort(ranks_.begin(), ranks_.end(), [](const Rank& a, const Rank& b) { return a.load < b.load; });
  }

  // Exchanges are cheap to look at; they come first, so that few replacements are looked at in full.
  Step best() {
    auto [load, rank, begin, end] = ranks_.back();
    for (size_t i = begin; i < end; ++i) exchange_from(slots_[i]);
    for (size_t i = begin; i < end; ++i) {
      if (slots_[i].may_grow || slots_[i].spare) replace_from(slots_[i]);
    }
    return best_;
  }

 private:
  struct Slot {
    size_t slot, rank;
    int64_t expert;
    double share, share_with_more;  // of one replica: as it is, and with one replica more
    double gain_with_more;          // of the ranks that have it, when there is one replica more
    double gain_without;            // of the other ranks that have it, when this one goes; less than zero
    bool spare, may_grow;           // whether its expert can do with one replica less, and take one more
  };
  struct Rank {
    double load;
    size_t rank, begin, end;  // of its slots in slots_
  };

  Slot weigh(size_t slot, size_t rank, int64_t expert) const {
    size_t count = placement_.count(expert);
    bool may_grow = count<placement_.most_replicas(), spare = count> placement_.machine().min_replicas;
    double share = placement_.share(expert), then = may_grow ? placement_.share(expert, count + 1) : share;
    double fewer = spare ? placement_.share(expert, count - 1) : share;
    double gain_with_more = 0, gain_without = 0;
    for (size_t other : placement_.slots_of(expert)) {
      double load = placement_.rank_load(placement_.rank_of(other));
      gain_with_more += squares(load, then - share);
      if (other == slot) continue;
      gain_without += squares(load, fewer - share);
      // The others then carry what this one did; not where that makes one of them the heaviest.
      spare &= load + fewer - share < most_;
    }
    return {slot, rank, expert, share, then, gain_with_more, gain_without, spare, may_grow};
  }

  void exchange_from(const Slot& mine) {
    for (const Rank& theirs : ranks_) {
      double gap = most_ - theirs.load;
      // Loads that end up equal are the best there can be, and further ranks are heavier.
      if (gap * gap / 4 <= best_.gain || theirs.rank == heavy_) return;
      if (placement_.may_hold(theirs.rank, mine.expert)) exchange_with(mine, theirs);
    }
  }

  void exchange_with(const Slot& mine, const Rank& theirs) {
    for (size_t i = theirs.begin; i < theirs.end; ++i) {
      double change = mine.share - slots_[i].share;
      if (change <= 0 || theirs.load + change >= most_) continue;
      double gain = (squares(most_, -change) + squares(theirs.load, change)) / 2;
      if (gain > best_.gain && slots_[i].expert != mine.expert &&
          placement_.may_hold(heavy_, slots_[i].expert)) {
        best_ = {gain, mine.slot, slots_[i].slot, kEmpty, true};
      }
    }
  }

  void replace_from(const Slot& mine) {
    for (const Slot& theirs : slots_) {
      if (mine.may_grow && theirs.spare) replace(theirs, mine);
      if (mine.spare && theirs.may_grow) replace(mine, theirs);
    }
  }

  // A slot gets one more replica of another's expert in place of what it has.
  void replace(const Slot& slot, const Slot& with) {
    double here = with.share_with_more - slot.share, load = placement_.rank_load(slot.rank);
    // Exact unless a rank has both experts, and then near enough to leave the rest out.
    double gain = squares(load, here) + with.gain_with_more + slot.gain_without;
    if (gain <= best_.gain || load + here >= most_) return;
    size_t fewer = placement_.count(slot.expert) - 1;
    if (fewer == 0 || slot.rank == with.rank || slot.expert == with.expert) return;
    if (!placement_.may_hold(slot.rank, with.expert)) return;
    changes_.clear();
    double shrunk = placement_.share(slot.expert, fewer) - slot.share;
    for (size_t at : placement_.slots_of(with.expert)) {
      add(placement_.rank_of(at), with.share_with_more - with.share);
    }
    for (size_t at : placement_.slots_of(slot.expert)) {
      if (at != slot.slot) add(placement_.rank_of(at), shrunk);
    }
    add(slot.rank, here);
    take_if_better(slot, with.expert);
  }

  void take_if_better(const Slot& slot, int64_t expert) {
    double gain = 0;
    bool lighter = false;
    for (auto [rank, change] : changes_) {
      double load = placement_.rank_load(rank);
      if (load + change >= most_) return;
      lighter |= rank == heavy_;
      gain += squares(load, change);
    }
    if (lighter && gain > best_.gain) best_ = {gain, slot.slot, slot.slot, expert, false};
  }

  void add(size_t rank, double change) {
    for (auto& [known, sum] : changes_) {
      if (known == rank) {
        sum += change;
        return;
      }
    }
    changes_.emplace_back(rank, change);
  }

  const Placement& placement_;
  size_t heavy_;
  double most_;
  Step best_;
  std::vector<Slot> slots_;
  std::vector<Rank> ranks_;  // lightest first
  std::vector<std::pair<size_t, double>> changes_;
};

void apply(Placement& placement, const Step& step) {
  int64_t mine = placement.expert_at(step.slot), theirs = placement.expert_at(step.other);
  placement.remove(step.slot);
  if (!step.exchange) {
    placement.put(step.slot, step.expert);
    return;
  }
  placement.remove(step.other);
  placement.put(step.slot, theirs);
  placement.put(step.other, mine);
}

}  // namespace

void balance(Placement& placement, double target, size_t budget) {
  while (placement.heaviest() > target) {
    Step step = Search(placement).best();
    size_t changed = step.exchange ? 2 : 1;
    if (step.gain <= 0 || changed > budget) return;
    apply(placement, step);
    budget -= changed;
  }
}

}  // namespace mooncake::ep
