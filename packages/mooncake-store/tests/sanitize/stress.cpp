// The store's core under a sanitizer, without Python: random steps of the allocator beside a bitmap, of every
// eviction policy beside a map of ids and pins, and of the object map beside its own books. Ends with 0 when
// the models agree and the sanitizer has nothing to say. What the policies decide is compared in the Python
// tests.
//
//   store_stress [seconds] [seed]   (`./dev sanitize` builds and runs it)
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>
#include <vector>

#include "best_fit.hpp"
#include "digests.hpp"
#include "eviction_queue.hpp"
#include "map_model.hpp"

namespace mooncake::store {

void require(bool so, const char* what) {
  if (so) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

}  // namespace mooncake::store

namespace {

using mooncake::store::BestFit;
using mooncake::store::EvictionQueue;
using mooncake::store::Piece;
using mooncake::store::require;
using Random = std::mt19937_64;

constexpr uint64_t kGranules = 512;
constexpr int kSteps = 2000;
uint64_t steps_done = 0;

class Space {
 public:
  explicit Space(uint64_t granule) : granule_(granule), space_(kGranules * granule + granule - 1, granule) {}

  void step(Random& random) {
    if (random() % 5 < 3) {
      uint64_t nbytes = random() % 2 == 0 ? random() % (20 * granule_) : random() % (200 * granule_);
      allocate(nbytes, random() % 5);
    } else if (!pieces_.empty()) {
      std::swap(pieces_[random() % pieces_.size()], pieces_.back());
      Piece piece = pieces_.back();
      pieces_.pop_back();
      mark(piece, false);
      require(space_.free(piece.offset, piece.nbytes) == BestFit::Freed::kOk, "a piece is taken back");
      require(space_.free(piece.offset, piece.nbytes) == BestFit::Freed::kUnknown, "and not twice");
    }
    require(space_.free_bytes() == (kGranules - taken_) * granule_, "the free bytes are counted");
    require(space_.live().size() == pieces_.size(), "all pieces are known");
  }

 private:
  void allocate(uint64_t nbytes, size_t most) {
    uint64_t free_before = space_.free_bytes();
    auto pieces = space_.allocate(nbytes, most);
    if (!pieces) {
      require(space_.free_bytes() == free_before, "a refusal takes nothing");
      require(most == 0 || space_.largest_hole_bytes() < nbytes, "what fits is not refused");
      return;
    }
    require(pieces->size() <= most, "no more pieces than asked for");
    uint64_t sum = 0;
    for (const Piece& piece : *pieces) {
      mark(piece, true);
      pieces_.push_back(piece);
      sum += piece.nbytes;
    }
    require(sum == nbytes, "the pieces add up");
  }

  void mark(const Piece& piece, bool taken) {
    require(piece.nbytes != 0 && piece.offset % granule_ == 0, "a piece begins with a granule");
    uint64_t first = piece.offset / granule_, count = space_.rounded(piece.nbytes) / granule_;
    for (uint64_t i = first; i < first + count; ++i) {
      require(map_.at(i) != taken, "no granule is in two pieces");
      map_[i] = taken;
    }
    taken_ += taken ? count : -count;
  }

  uint64_t granule_;
  BestFit space_;
  std::vector<bool> map_ = std::vector<bool>(kGranules);
  std::vector<Piece> pieces_;
  uint64_t taken_ = 0;
};

class Queue {
 public:
  explicit Queue(const char* policy) : queue_(EvictionQueue::make(policy)) {
    require(queue_ != nullptr, "the policy is there");
  }

  void step(Random& random) {
    uint64_t id = random() % 64;
    bool there = pins_.count(id) != 0;
    switch (random() % 7) {
      case 0:
      case 1:
        require(queue_->insert(id, random() % 64, random() % 3 * 4096) == !there, "new ids are taken");
        pins_.emplace(id, 0);
        break;
      case 2:
        require(queue_->touch(id) == there, "ids that are there are touched");
        break;
      case 3:
        require(queue_->pin(id) == there, "ids that are there are pinned");
        if (there) ++pins_[id];
        break;
      case 4:
        require(queue_->unpin(id) == (there && pins_[id] != 0), "pinned ids are unpinned");
        if (there && pins_[id] != 0) --pins_[id];
        break;
      case 5:
        require(queue_->remove(id) == there, "ids that are there are removed");
        pins_.erase(id);
        break;
      default:
        evict(random() % 4 != 0);
    }
    require(queue_->size() == pins_.size(), "all ids are counted");
    require(queue_->contains(id) == (pins_.count(id) != 0), "membership is known");
  }

 private:
  void evict(bool really) {
    auto victim = queue_->victim();
    if (!victim) {
      for (auto [id, pins] : pins_) require(pins != 0, "an id that is not pinned can leave");
      return;
    }
    auto found = pins_.find(*victim);
    require(found != pins_.end() && found->second == 0, "the victim is there and not pinned");
    if (!really) return;
    require(queue_->remove(*victim), "the victim leaves");
    pins_.erase(found);
  }

  std::unique_ptr<EvictionQueue> queue_;
  std::map<uint64_t, int> pins_;
};

// A policy with nodes of its own, in a map.
class Foreign final : public mooncake::store::ForeignOrder {
 public:
  explicit Foreign(const char* policy) : queue_(EvictionQueue::make(policy)) {}
  void insert(uint64_t id, uint64_t key, uint64_t nbytes) override {
    require(queue_->insert(id, key, nbytes), "a new id is inserted");
  }
  void touch(uint64_t id) override { require(queue_->touch(id), "what is touched is there"); }
  void pin(uint64_t id) override { require(queue_->pin(id), "what is pinned is there"); }
  void unpin(uint64_t id) override { require(queue_->unpin(id), "what is unpinned is pinned"); }
  void remove(uint64_t id) override { require(queue_->remove(id), "what leaves is there"); }
  std::optional<uint64_t> victim() override { return queue_->victim(); }

 private:
  std::unique_ptr<EvictionQueue> queue_;
};

// Digests of every length, at the end of their memory.
void hash_lengths(Random& random) {
  for (size_t length = 17; length < 1200; length += 1 + random() % 40) {
    std::vector<uint8_t> bytes(length, static_cast<uint8_t>(random()));
    uint8_t first[16], second[16];
    mooncake::store::xxh3_128(bytes.data(), length, first);
    mooncake::store::xxh3_128(bytes.data(), length, second);
    require(std::equal(first, first + 16, second), "a digest is one of the bytes");
  }
}

template <typename Model>
void run(Model&& model, Random& random) {
  for (int i = 0; i < kSteps; ++i) model.step(random);
  steps_done += kSteps;
}

}  // namespace

int main(int argc, char** argv) {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(argc > 1 ? std::atoi(argv[1]) : 3);
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Random random(seed);
  do {
    for (uint64_t granule : {1ull, 4096ull, 131072ull}) run(Space(granule), random);
    using Kind = mooncake::store::Orders::Kind;
    run(mooncake::store::MapModel(Kind::kClock, {}), random);
    run(mooncake::store::MapModel(Kind::kLru, {}), random);
    run(mooncake::store::MapModel(Kind::kClock, {}, true), random);
    for (const char* policy : {"arc", "gdsf"}) {
      auto make = [policy] { return std::make_unique<Foreign>(policy); };
      run(mooncake::store::MapModel(Kind::kForeign, make), random);
    }
    hash_lengths(random);
    for (const char* policy : {"clock", "lru", "arc", "gdsf"}) run(Queue(policy), random);
  } while (std::chrono::steady_clock::now() < end);
  std::printf("store: %llu steps\n", static_cast<unsigned long long>(steps_done));
  return 0;
}
