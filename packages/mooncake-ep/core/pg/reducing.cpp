// Reductions. All of a rank's input is in shared memory before it publishes: whoever contributes does so to
// every element, and survivors can finish for those who die afterwards.
#include <algorithm>
#include <cstring>

#include "collectives.hpp"
#include "signatures.hpp"

namespace mooncake::ep::pg {

namespace {

// Up to here each rank reduces everything: one round fewer, and no result to fetch.
constexpr uint64_t kOneStepBytes = 32 << 10;

struct Share {
  size_t begin, end;
};

// Whole cache lines for each of `parts`.
Share share_of(size_t index, size_t parts, size_t count, size_t element_nbytes) {
  size_t line = 64 / element_nbytes;
  size_t each = ((count + parts - 1) / parts + line - 1) / line * line;
  return {std::min(index * each, count), std::min((index + 1) * each, count)};
}

}  // namespace

void Collectives::reduce_from(const std::vector<int>& ranks, const Reduction& reduction, int half,
                              const void* own, uint64_t offset, void* out, size_t count) const {
  const void* sources[kMaxRanks];
  size_t found = 0;
  for (int rank : ranks) {
    sources[found++] = rank == group_.rank() ? own : group_.input(rank, half) + offset;
  }
  reduce(reduction, out, sources, found, count);
}

std::vector<int> Collectives::all_reduce(const Reduction& reduction, void* data, size_t count,
                                         const Wait& wait) {
  uint64_t nbytes = count * nbytes_of(reduction.type);
  check_room(nbytes);
  int half = group_.next_half();
  uint64_t signature = sign(Kind::kAllReduce, reduction, nbytes);
  if (group_.joined()) std::memcpy(group_.input(group_.rank(), half), data, nbytes);
  auto contributors = group_.round(signature, wait);
  if (contributors.size() <= 2 || nbytes <= kOneStepBytes) {
    group_.faults().at(Point::kWhileReading);
    reduce_from(contributors, reduction, half, data, 0, data, count);
  } else {
    all_reduce_shares(contributors, reduction, half, static_cast<uint8_t*>(data), count, signature, wait);
  }
  group_.still_in();
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

void Collectives::all_reduce_shares(const std::vector<int>& contributors, const Reduction& reduction,
                                    int half, uint8_t* data, size_t count, uint64_t signature,
                                    const Wait& wait) {
  size_t element = nbytes_of(reduction.type), parts = contributors.size();
  auto reduce_share = [&](size_t index, uint8_t* out) {
    Share share = share_of(index, parts, count, element);
    uint64_t offset = share.begin * element;
    reduce_from(contributors, reduction, half, data + offset, offset, out + offset, share.end - share.begin);
  };
  auto mine = std::find(contributors.begin(), contributors.end(), group_.rank()) - contributors.begin();
  reduce_share(static_cast<size_t>(mine), group_.result(group_.rank(), half));
  group_.faults().at(Point::kBeforeResult);
  auto finished = group_.round(signature + 1, wait);
  for (size_t index = 0; index < parts; ++index) {
    int rank = contributors[index];
    group_.faults().at(Point::kWhileReading);
    if (!std::binary_search(finished.begin(), finished.end(), rank)) {
      reduce_share(index, data);
      continue;
    }
    Share share = share_of(index, parts, count, element);
    std::memcpy(data + share.begin * element, group_.result(rank, half) + share.begin * element,
                (share.end - share.begin) * element);
  }
}

std::vector<int> Collectives::reduce_to(int root, const Reduction& reduction, void* data, size_t count,
                                        const Wait& wait) {
  check_root(root);
  uint64_t nbytes = count * nbytes_of(reduction.type);
  check_room(nbytes);
  int half = group_.next_half();
  bool here = root == group_.rank();
  if (!here && group_.joined()) std::memcpy(group_.input(group_.rank(), half), data, nbytes);
  auto contributors = group_.round(sign(Kind::kReduce, reduction, nbytes, root), wait);
  if (here) reduce_from(contributors, reduction, half, data, 0, data, count);
  group_.still_in();
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

std::vector<int> Collectives::reduce_scatter(const Reduction& reduction, void* out,
                                             const std::vector<Bytes>& inputs, const Wait& wait) {
  uint64_t total = 0, offset = 0;
  for (const Bytes& input : inputs) total += input.nbytes;
  check_room(total);
  int half = group_.next_half(), me = group_.rank();
  for (size_t rank = 0; rank < inputs.size() && group_.joined(); ++rank) {
    uint8_t* place = group_.input(me, half);
    uint64_t at = 0;
    for (size_t before = 0; before < rank; ++before) at += inputs[before].nbytes;
    if (static_cast<int>(rank) != me) std::memcpy(place + at, inputs[rank].data, inputs[rank].nbytes);
  }
  for (int rank = 0; rank < me; ++rank) offset += inputs[rank].nbytes;
  auto contributors = group_.round(sign(Kind::kReduceScatter, reduction, total), wait);
  group_.faults().at(Point::kWhileReading);
  const Bytes& own = inputs[me];
  reduce_from(contributors, reduction, half, own.data, offset, out, own.nbytes / nbytes_of(reduction.type));
  group_.still_in();
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

}  // namespace mooncake::ep::pg
