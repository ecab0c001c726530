#include "rows.hpp"

#include <cstring>
#include <vector>

namespace mooncake::ep {

namespace {

int32_t local(const Routing& routing, size_t token, size_t choice) {
  int64_t expert = routing.topk[token * routing.choices + choice];
  return expert < 0 ? -1 : routing.local_of[expert];
}

bool goes_there(const Routing& routing, size_t token) {
  for (size_t choice = 0; choice < routing.choices; ++choice) {
    if (local(routing, token, choice) >= 0) return true;
  }
  return false;
}

void copy_row(const Rows& rows, size_t token, size_t row) {
  std::memcpy(rows.to + row * rows.row_bytes, rows.from + token * rows.row_bytes, rows.row_bytes);
}

void copy_scales(const Rows& rows, size_t token, float* to, size_t stride) {
  if (rows.scales_from == nullptr) return;
  const float* from = rows.scales_from + token * rows.groups;
  for (size_t group = 0; group < rows.groups; ++group) to[group * stride] = from[group];
}

}  // namespace

size_t count_tokens(const Routing& routing, int64_t* per_expert) {
  size_t found = 0;
  for (size_t token = 0; token < routing.tokens; ++token) {
    bool here = false;
    for (size_t choice = 0; choice < routing.choices; ++choice) {
      int32_t expert = local(routing, token, choice);
      if (expert < 0) continue;
      here = true;
      ++per_expert[expert];
    }
    found += here;
  }
  return found;
}

void take_tokens(const Routing& routing, const Rows& rows, const float* weights, int64_t* topk_to,
                 float* weights_to, int64_t* taken) {
  size_t row = 0;
  for (size_t token = 0; token < routing.tokens; ++token) {
    if (!goes_there(routing, token)) continue;
    copy_row(rows, token, row);
    copy_scales(rows, token, rows.scales_to + row * rows.groups, 1);
    for (size_t choice = 0; choice < routing.choices; ++choice) {
      int32_t expert = local(routing, token, choice);
      size_t at = row * routing.choices + choice;
      if (topk_to != nullptr) topk_to[at] = expert;
      if (weights_to != nullptr)
        weights_to[at] = expert < 0 ? 0.0f : weights[token * routing.choices + choice];
    }
    taken[row++] = static_cast<int64_t>(token);
  }
}

void take_choices(const Routing& routing, const Rows& rows, size_t rows_of_expert, int64_t* next,
                  int32_t* taken) {
  for (size_t token = 0; token < routing.tokens; ++token) {
    for (size_t choice = 0; choice < routing.choices; ++choice) {
      int32_t expert = local(routing, token, choice);
      if (expert < 0) continue;
      size_t place = static_cast<size_t>(next[expert]++), first = expert * rows_of_expert;
      copy_row(rows, token, first + place);
      copy_scales(rows, token, rows.scales_to + first * rows.groups + place, rows_of_expert);
      taken[first + place] = static_cast<int32_t>(token);
    }
  }
}

void take_expanded(const Routing& routing, const Rows& rows, const float* weights, int64_t* next,
                   float* weights_to, int64_t* taken) {
  for (size_t token = 0; token < routing.tokens; ++token) {
    for (size_t choice = 0; choice < routing.choices; ++choice) {
      int32_t expert = local(routing, token, choice);
      if (expert < 0) continue;
      size_t row = static_cast<size_t>(next[expert]++);
      copy_row(rows, token, row);
      copy_scales(rows, token, rows.scales_to + row * rows.groups, 1);
      if (weights_to != nullptr) weights_to[row] = weights[token * routing.choices + choice];
      taken[row] = static_cast<int64_t>(token);
    }
  }
}

void copy_blocks(const uint8_t* from, uint8_t* to, size_t blocks, size_t block_bytes, const int64_t* counts,
                 size_t row_bytes) {
  for (size_t block = 0; block < blocks; ++block) {
    size_t at = block * block_bytes;
    std::memcpy(to + at, from + at, static_cast<size_t>(counts[block]) * row_bytes);
  }
}

void find_choices(const int64_t* topk, size_t tokens, size_t choices, const uintptr_t* base, size_t experts,
                  size_t row_bytes, uintptr_t* addends) {
  std::vector<size_t> seen(experts);
  for (size_t i = 0; i < tokens * choices; ++i) {
    int64_t expert = topk[i];
    bool there = expert >= 0 && base[expert] != 0;
    addends[i] = there ? base[expert] + seen[expert]++ * row_bytes : 0;
  }
}

void find_ranks(const int64_t* topk, size_t tokens, size_t choices, const int32_t* rank_of,
                const uintptr_t* base, size_t ranks, size_t row_bytes, uintptr_t* addends) {
  std::vector<size_t> seen(ranks);
  std::memset(addends, 0, tokens * ranks * sizeof(*addends));
  for (size_t token = 0; token < tokens; ++token) {
    uintptr_t* mine = addends + token * ranks;
    for (size_t choice = 0; choice < choices; ++choice) {
      int64_t expert = topk[token * choices + choice];
      if (expert < 0) continue;
      auto rank = static_cast<size_t>(rank_of[expert]);
      if (base[rank] != 0 && mine[rank] == 0) mine[rank] = base[rank] + seen[rank]++ * row_bytes;
    }
  }
}

}  // namespace mooncake::ep
