// The memory of segments, for a model: each granule has the version of what was last written there.
#pragma once

#include <map>
#include <utility>
#include <vector>

#include "object_map.hpp"

namespace mooncake::store {

void require(bool so, const char* what);

class Stamps {
 public:
  static constexpr uint64_t kGranule = 4096;

  uint64_t at(uint64_t segment, uint64_t granule) { return versions_[{segment, granule}]; }

  void write(const Segments& segments, const std::vector<Extent>& extents, uint64_t version) {
    for (const Extent& extent : extents) {
      for (uint64_t i = 0; i * kGranule < extent.nbytes; ++i) {
        versions_[{segments[extent.segment].id, extent.granule + i}] = version;
      }
    }
  }

  void write(const Rows& rows, uint64_t version) {
    each(rows, [&](uint64_t& there) { there = version; });
  }

  bool have(const Rows& rows, uint64_t version) {
    bool all = true;
    each(rows, [&](uint64_t there) { all &= there == version; });
    return all;
  }

 private:
  template <typename F>
  void each(const Rows& rows, F&& visit) {
    for (size_t i = 0; i < rows.size(); i += 5) {
      for (uint64_t inside = 0; inside < rows[i + 4]; inside += kGranule) {
        visit(versions_[{rows[i + 2], (rows[i + 3] + inside) / kGranule}]);
      }
    }
  }

  std::map<std::pair<uint64_t, uint64_t>, uint64_t> versions_;
};

inline void check_replicas(const Segments& segments, const std::vector<Extent>& extents) {
  std::map<uint32_t, uint8_t> owners;
  std::map<uint8_t, bool> whole;
  bool stays = extents.empty();
  for (const Extent& extent : extents) {
    const Segment& segment = segments[extent.segment];
    whole.emplace(extent.replica, true);
    whole[extent.replica] &= segment.there && !extent.leaving;
    if (!segment.there) continue;
    auto [found, first] = owners.emplace(segment.owner, extent.replica);
    require(first || found->second == extent.replica, "replicas have different owners");
  }
  for (auto [replica, good] : whole) stays |= good;
  require(stays, "a whole replica stays of what is found");
}

}  // namespace mooncake::store
