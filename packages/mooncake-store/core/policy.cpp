#include "policy.hpp"

namespace mooncake::store {

namespace {

class Lru : public Policy {
 public:
  explicit Lru(Nodes& nodes) : nodes_(nodes), order_(nodes) {}
  void insert(uint32_t at) override { order_.push_young(at); }
  void touch(uint32_t at) override {
    if (!nodes_[at].parked) order_.make_young(at);
  }
  void leave(uint32_t at) override { order_.erase(at); }
  void come_back(uint32_t at) override { order_.push_young(at); }
  uint32_t oldest() override { return order_.oldest(); }

 protected:
  Nodes& nodes_;
  List order_;
};

// A queue whose head gets another round for every recent use it has had, up to three. A hit moves nothing.
class Clock final : public Lru {
 public:
  using Lru::Lru;
  void touch(uint32_t at) override {
    constexpr uint32_t kMaxUses = 3;
    if (nodes_[at].uses < kMaxUses) ++nodes_[at].uses;
  }
  bool spare(uint32_t at) override {
    if (nodes_[at].uses == 0) return false;
    --nodes_[at].uses;
    order_.make_young(at);
    return true;
  }
};

}  // namespace

std::unique_ptr<Policy> make_policy(std::string_view name, Nodes& nodes) {
  if (name == "clock") return std::make_unique<Clock>(nodes);
  if (name == "lru") return std::make_unique<Lru>(nodes);
  if (name == "arc") return make_arc(nodes);
  if (name == "gdsf") return make_gdsf(nodes);
  return nullptr;
}

}  // namespace mooncake::store
