// Which address of a port others should use.
#pragma once

#include <span>
#include <string>

#include "ibverbs_abi.hpp"

namespace mooncake::verbs {

struct GidCandidate {
  ibv::Gid gid{};
  int index = -1;
  uint32_t type = ibv::kGidIb;
  std::string interface;  // empty when it belongs to none
};

// The lower the better; -1 for one that cannot be used. On Ethernet: RoCEv2 before v1, and then an IPv4
// address before a global IPv6 one before a link-local one; interfaces of overlay networks (containers,
// tunnels), which other hosts do not reach, come last.
int rank_of(const GidCandidate& candidate, bool ethernet);
// Null when none can be used. Of equals the one with the lowest index.
const GidCandidate* best_gid(std::span<const GidCandidate> candidates, bool ethernet);

std::string text_of(const ibv::Gid& gid);

}  // namespace mooncake::verbs
