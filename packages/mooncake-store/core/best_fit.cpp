#include "best_fit.hpp"

namespace mooncake::store {

std::optional<std::vector<Piece>> BestFit::allocate(uint64_t nbytes, size_t max_pieces) {
  std::vector<Piece> pieces;
  uint64_t missing = nbytes, granule = granule_bytes();
  while (missing != 0 && pieces.size() < max_pieces) {
    // The hole that suits all the rest, else the largest there is: that needs the fewest pieces.
    uint64_t wanted = space_.granules(missing);
    auto run = space_.take(wanted, nbytes <= kSmallBytes && missing == nbytes);
    if (!run) run = space_.take_most(wanted);
    if (!run) break;
    live_.emplace(run->start, run->size);
    uint64_t filled = run->size == wanted ? missing : run->size * granule;
    pieces.push_back({run->start * granule, filled});
    missing -= filled;
  }
  if (missing == 0) return pieces;
  for (const Piece& piece : pieces) free(piece.offset, piece.nbytes);
  return std::nullopt;
}

BestFit::Freed BestFit::free(uint64_t offset, uint64_t nbytes) {
  auto found = offset % granule_bytes() == 0 ? live_.find(offset / granule_bytes()) : live_.end();
  if (found == live_.end()) return Freed::kUnknown;
  Run run{found->first, found->second};
  if (run.size != space_.granules(nbytes)) return Freed::kOtherSize;
  live_.erase(found);
  space_.give_back(run);
  return Freed::kOk;
}

std::vector<Piece> BestFit::live() const {
  std::vector<Piece> pieces;
  pieces.reserve(live_.size());
  for (auto [start, size] : live_) pieces.push_back({start * granule_bytes(), size * granule_bytes()});
  return pieces;
}

}  // namespace mooncake::store
