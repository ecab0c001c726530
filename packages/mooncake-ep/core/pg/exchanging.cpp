// All-to-all: each rank has bytes of any number for each other one, and only the sender knows how many.
#include <algorithm>
#include <cstring>
#include <string>

#include "collectives.hpp"
#include "signatures.hpp"

namespace mooncake::ep::pg {

namespace {

constexpr uint64_t kExchanged =
    512 << 10;  // bytes that a rank publishes in one round, for all others together

// What lies in a rank's half of the inputs: first how many bytes there are for each rank, then two buffers.
struct Exchange {
  uint64_t capacity;
  uint64_t chunk;

  uint64_t buffer(uint64_t index) const {
    uint64_t table = (capacity * sizeof(uint64_t) + 4095) / 4096 * 4096;
    return table + (index & 1) * capacity * chunk;
  }
};

Bytes part_of(const Bytes& bytes, uint64_t index, uint64_t chunk) {
  uint64_t begin = std::min(index * chunk, bytes.nbytes);
  return {bytes.data + begin, std::min(chunk, bytes.nbytes - begin)};
}

uint64_t rounds_of(const std::vector<const uint64_t*>& tables, size_t ranks, uint64_t chunk) {
  uint64_t most = 1;
  for (const uint64_t* table : tables) {
    for (size_t rank = 0; rank < ranks; ++rank) most = std::max(most, (table[rank] + chunk - 1) / chunk);
  }
  return most;
}

}  // namespace

std::vector<int> Collectives::all_to_all(const std::vector<Bytes>& outs, const std::vector<Bytes>& inputs,
                                         const Wait& wait) {
  int half = group_.next_half(), me = group_.rank();
  size_t ranks = inputs.size();
  Exchange exchange{static_cast<uint64_t>(group_.capacity()), 0};
  exchange.chunk = std::max<uint64_t>(kExchanged / exchange.capacity, 4096);
  auto table_of = [&](int rank) { return reinterpret_cast<uint64_t*>(group_.input(rank, half)); };
  for (size_t rank = 0; rank < ranks; ++rank) table_of(me)[rank] = inputs[rank].nbytes;

  uint64_t signature = sign(Kind::kAllToAll, ranks), rounds = 1;
  std::vector<int> contributors;
  std::string wrong;
  for (uint64_t index = 0; index < rounds; ++index) {
    for (size_t rank = 0; rank < ranks; ++rank) {
      if (static_cast<int>(rank) == me) continue;
      Bytes part = part_of(inputs[rank], index, exchange.chunk);
      uint8_t* place = group_.input(me, half) + exchange.buffer(index) + rank * exchange.chunk;
      if (part.nbytes > 0) std::memcpy(place, part.data, part.nbytes);
    }
    contributors = group_.round(signature, wait);
    if (index == 0) {
      // Those who are there now decide how many rounds there are, also when one of them dies meanwhile.
      std::vector<const uint64_t*> tables;
      for (int member : contributors) tables.push_back(table_of(member));
      rounds = rounds_of(tables, ranks, exchange.chunk);
    }
    for (int member : contributors) {
      group_.faults().at(Point::kWhileReading);
      const Bytes& out = outs[member];
      if (table_of(member)[me] != out.nbytes) {
        wrong = "rank " + std::to_string(member) + " sends " + std::to_string(table_of(member)[me]) +
                " bytes to rank " + std::to_string(me) + ", which expects " + std::to_string(out.nbytes);
        continue;
      }
      Bytes part = part_of(out, index, exchange.chunk);
      if (part.nbytes == 0) continue;
      const uint8_t* from = member == me ? part_of(inputs[me], index, exchange.chunk).data
                                         : group_.input(member, half) + exchange.buffer(index) +
                                               static_cast<uint64_t>(me) * exchange.chunk;
      std::memmove(part.data, from, part.nbytes);
    }
  }
  for (size_t rank = 0; rank < outs.size(); ++rank) {
    bool there = std::binary_search(contributors.begin(), contributors.end(), static_cast<int>(rank));
    if (!there && outs[rank].nbytes > 0) std::memset(outs[rank].data, 0, outs[rank].nbytes);
  }
  group_.still_in();
  if (!wrong.empty()) throw Stop(Code::kMismatch, wrong);
  group_.faults().at(Point::kBeforeReturn);
  return contributors;
}

}  // namespace mooncake::ep::pg
