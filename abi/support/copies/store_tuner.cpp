#include "store_tuner.hpp"

#include <algorithm>
#include <bit>

namespace mooncake::driver {

StoreTuner::Choice StoreTuner::choose(uint64_t bytes) {
  size_t size_class = std::min<size_t>(static_cast<size_t>(std::bit_width(bytes)), kClasses - 1);
  std::lock_guard lock(mutex_);
  SizeClass& of = classes_[size_class];
  if (of.left == 0) {
    of.left = kTrialBatches;
    if (++of.trying == kWays) judge(of);
  }
  --of.left;
  // The last ones of each turn: by then the cache is as this way of copying leaves it.
  bool counts = of.left < kTrialBatches - 1;
  size_t way = (of.best + of.trying) % kWays;
  return {static_cast<Stores>(way), counts, size_class, of.round};
}

void StoreTuner::judge(SizeClass& of) {
  auto fastest = std::min_element(of.ns_per_byte.begin(), of.ns_per_byte.end());
  bool better = *fastest < kClearly * of.ns_per_byte[of.best];
  if (better) of.best = static_cast<size_t>(fastest - of.ns_per_byte.begin());
  of.interval = better ? kFirstInterval : std::min(2 * of.interval, kMostInterval);
  of.left = of.interval;
  of.trying = 0;
  of.ns_per_byte = kUnknown;
  ++of.round;
}

void StoreTuner::note(const Choice& choice, uint64_t bytes, uint64_t ns) {
  if (!choice.counts || bytes == 0) return;
  double found = static_cast<double>(ns) / static_cast<double>(bytes);
  std::lock_guard lock(mutex_);
  SizeClass& of = classes_[choice.size_class];
  if (of.round != choice.round) return;  // too late: it is decided
  // The fastest of a few: everything else that happens on a machine only makes copies slower.
  double& best = of.ns_per_byte[static_cast<size_t>(choice.stores)];
  best = std::min(best, found);
}

}  // namespace mooncake::driver
