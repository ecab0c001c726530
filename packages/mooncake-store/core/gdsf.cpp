// GDSF (Cherkasova, HP Labs 1998), at equal cost of every miss: the id to go has the least uses for its size,
// where the rank of the last one that went is added to every rank that is given later. That ages what was
// used long ago.
#include <algorithm>
#include <set>
#include <tuple>

#include "policy.hpp"

namespace mooncake::store {

namespace {

class Gdsf final : public Policy {
 public:
  explicit Gdsf(Nodes& nodes) : nodes_(nodes) {}

  void insert(uint32_t at) override { use(at); }

  void touch(uint32_t at) override {
    if (nodes_[at].parked) {
      rank(at);
      return;
    }
    leave(at);
    use(at);
  }

  void leave(uint32_t at) override { order_.erase(place(at)); }

  void come_back(uint32_t at) override {
    nodes_[at].stamp = ++stamp_;
    order_.insert(place(at));
  }

  uint32_t oldest() override { return order_.empty() ? kNone : std::get<uint32_t>(*order_.begin()); }
  void evicted(uint32_t at) override { floor_ = std::max(floor_, nodes_[at].rank); }

 private:
  using Place = std::tuple<double, uint64_t, uint32_t>;  // the older of two with one rank goes first

  Place place(uint32_t at) { return {nodes_[at].rank, nodes_[at].stamp, at}; }

  void rank(uint32_t at) {
    Node& node = nodes_[at];
    ++node.uses;
    node.rank =
        floor_ + static_cast<double>(node.uses) / static_cast<double>(std::max<uint64_t>(node.nbytes, 1));
  }

  void use(uint32_t at) {
    rank(at);
    come_back(at);
  }

  Nodes& nodes_;
  std::set<Place> order_;
  uint64_t stamp_ = 0;
  double floor_ = 0;
};

}  // namespace

std::unique_ptr<Policy> make_gdsf(Nodes& nodes) { return std::make_unique<Gdsf>(nodes); }

}  // namespace mooncake::store
