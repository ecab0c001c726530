// Collectives that move bytes. Long ones go in chunks that stay in the cache between writer and readers, from
// two buffers in turn.
#include <algorithm>
#include <cstring>
#include <string>

#include "collectives.hpp"
#include "signatures.hpp"

namespace mooncake::ep::pg {

namespace {

constexpr uint64_t kChunk = 256 << 10;  // bytes that a rank publishes in one round

uint64_t pieces_of(uint64_t nbytes, uint64_t chunk) {
  return std::max<uint64_t>((nbytes + chunk - 1) / chunk, 1);
}

// The part of `bytes` that round `index` moves.
Bytes piece(const Bytes& bytes, uint64_t index, uint64_t chunk) {
  uint64_t begin = std::min(index * chunk, bytes.nbytes);
  return {bytes.data + begin, std::min(chunk, bytes.nbytes - begin)};
}

void copy(uint8_t* to, const uint8_t* from, uint64_t nbytes) {
  if (nbytes > 0 && to != from) std::memmove(to, from, nbytes);
}

bool has(const std::vector<int>& ranks, size_t rank) {
  return std::binary_search(ranks.begin(), ranks.end(), static_cast<int>(rank));
}

void clear_missing(const std::vector<Bytes>& outs, const std::vector<int>& contributors) {
  for (size_t rank = 0; rank < outs.size(); ++rank) {
    if (!has(contributors, rank) && outs[rank].nbytes > 0) std::memset(outs[rank].data, 0, outs[rank].nbytes);
  }
}

}  // namespace

void Collectives::check_room(uint64_t nbytes) const {
  if (nbytes <= group_.layout().region_nbytes) return;
  throw Stop(Code::kInvalid, std::to_string(nbytes) + " bytes in one reduction are more than the " +
                                 std::to_string(group_.layout().region_nbytes) +
                                 " that this group has room for; reduce the tensor in parts");
}

void Collectives::check_root(int root) const {
  if (root >= 0 && root < group_.capacity()) return;
  throw Stop(Code::kInvalid, "root is rank " + std::to_string(root) + "; ranks go from 0 to " +
                                 std::to_string(group_.capacity() - 1));
}

std::vector<int> Collectives::barrier(const Wait& wait) {
  group_.next_half();  // every collective takes one, so that ranks which called different ones stay in step
  auto contributors = group_.round(sign(Kind::kBarrier), wait);
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

std::vector<int> Collectives::gather_to(bool here, uint64_t signature, const std::vector<Bytes>& outs,
                                        Bytes in, const Wait& wait) {
  int half = group_.next_half();
  std::vector<int> contributors;
  for (uint64_t index = 0; index < pieces_of(in.nbytes, kChunk); ++index) {
    uint64_t buffer = (index & 1) * kChunk;
    Bytes part = piece(in, index, kChunk);
    copy(group_.input(group_.rank(), half) + buffer, part.data, part.nbytes);
    contributors = group_.round(signature, wait);
    for (int member : contributors) {
      if (!here || member >= static_cast<int>(outs.size())) continue;
      group_.faults().at(Point::kWhileReading);
      const uint8_t* from = member == group_.rank() ? part.data : group_.input(member, half) + buffer;
      copy(piece(outs[member], index, kChunk).data, from, part.nbytes);
    }
  }
  if (here) clear_missing(outs, contributors);
  group_.still_in();
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

std::vector<int> Collectives::all_gather(const std::vector<Bytes>& outs, Bytes in, const Wait& wait) {
  return gather_to(true, sign(Kind::kAllGather, in.nbytes), outs, in, wait);
}

std::vector<int> Collectives::gather(int root, const std::vector<Bytes>& outs, Bytes in, const Wait& wait) {
  check_root(root);
  uint64_t signature = sign(Kind::kGather, in.nbytes, static_cast<uint64_t>(root));
  return gather_to(root == group_.rank(), signature, outs, in, wait);
}

std::vector<int> Collectives::broadcast(int root, Bytes data, const Wait& wait) {
  check_root(root);
  int half = group_.next_half();
  bool here = root == group_.rank();
  uint64_t signature = sign(Kind::kBroadcast, data.nbytes, static_cast<uint64_t>(root));
  std::vector<int> contributors;
  for (uint64_t index = 0; index < pieces_of(data.nbytes, kChunk); ++index) {
    uint64_t buffer = (index & 1) * kChunk;
    Bytes part = piece(data, index, kChunk);
    if (here) copy(group_.input(root, half) + buffer, part.data, part.nbytes);
    contributors = group_.round(signature, wait);
    if (!has(contributors, static_cast<size_t>(root))) {
      throw Stop(Code::kRankFailed,
                 "rank " + std::to_string(root) +
                     ", the root of a broadcast, is gone; choose another root that has the data");
    }
    group_.faults().at(Point::kWhileReading);
    if (!here) copy(part.data, group_.input(root, half) + buffer, part.nbytes);
  }
  group_.still_in();
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

std::vector<int> Collectives::scatter(int root, Bytes out, const std::vector<Bytes>& inputs,
                                      const Wait& wait) {
  check_root(root);
  int half = group_.next_half(), me = group_.rank();
  auto capacity = static_cast<uint64_t>(group_.capacity());
  uint64_t chunk = std::max<uint64_t>(kChunk / capacity, 4096);
  uint64_t signature = sign(Kind::kScatter, out.nbytes, static_cast<uint64_t>(root));
  std::vector<int> contributors;
  for (uint64_t index = 0; index < pieces_of(out.nbytes, chunk); ++index) {
    uint64_t buffer = (index & 1) * chunk * capacity;
    for (size_t rank = 0; rank < inputs.size() && root == me; ++rank) {
      Bytes part = piece(inputs[rank], index, chunk);
      copy(group_.input(me, half) + buffer + rank * chunk, part.data, part.nbytes);
    }
    contributors = group_.round(signature, wait);
    if (!has(contributors, static_cast<size_t>(root))) {
      throw Stop(Code::kRankFailed,
                 "rank " + std::to_string(root) +
                     ", the root of a scatter, is gone; choose another root that has the data");
    }
    Bytes part = piece(out, index, chunk);
    group_.faults().at(Point::kWhileReading);
    copy(part.data, group_.input(root, half) + buffer + static_cast<uint64_t>(me) * chunk, part.nbytes);
  }
  group_.still_in();
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

}  // namespace mooncake::ep::pg
