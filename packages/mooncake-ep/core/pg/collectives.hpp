// The collectives over one group, as sequences of rounds. All memory is the caller's until the call returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "../kernels/reduce.hpp"
#include "group.hpp"

namespace mooncake::ep::pg {

struct Bytes {
  uint8_t* data;
  uint64_t nbytes;
};

class Collectives {
 public:
  explicit Collectives(Group& group) : group_(group) {}

  // Every function returns who contributed, the same on all members: for reductions, who had published all of
  // its input; for the others, who was there to the end. What is to come from anybody else is filled with
  // zeros. `extent`: ranks that the caller's lists have places for.
  std::vector<int> barrier(const Wait& wait);
  std::vector<int> all_reduce(const Reduction& reduction, void* data, size_t count, const Wait& wait);
  std::vector<int> reduce_to(int root, const Reduction& reduction, void* data, size_t count,
                             const Wait& wait);
  // `inputs[rank]` goes to `rank`; `out` has the size of this rank's own. One operation for all of them.
  std::vector<int> reduce_scatter(const Reduction& reduction, void* out, const std::vector<Bytes>& inputs,
                                  const Wait& wait);
  std::vector<int> all_gather(const std::vector<Bytes>& outs, Bytes in, const Wait& wait);
  std::vector<int> gather(int root, const std::vector<Bytes>& outs, Bytes in, const Wait& wait);
  // Stop(kRankFailed) when the root is gone before all has come.
  std::vector<int> broadcast(int root, Bytes data, const Wait& wait);
  std::vector<int> scatter(int root, Bytes out, const std::vector<Bytes>& inputs, const Wait& wait);
  std::vector<int> all_to_all(const std::vector<Bytes>& outs, const std::vector<Bytes>& inputs,
                              const Wait& wait);

 private:
  struct Pieces;
  std::vector<int> gather_to(bool here, uint64_t signature, const std::vector<Bytes>& outs, Bytes in,
                             const Wait& wait);
  void reduce_from(const std::vector<int>& ranks, const Reduction& reduction, int half, const void* own,
                   uint64_t offset, void* out, size_t count) const;
  void all_reduce_shares(const std::vector<int>& contributors, const Reduction& reduction, int half,
                         uint8_t* data, size_t count, uint64_t signature, const Wait& wait);
  void check_room(uint64_t nbytes) const;
  void check_root(int root) const;

  Group& group_;
};

}  // namespace mooncake::ep::pg
