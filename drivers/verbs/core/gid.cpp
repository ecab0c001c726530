#include "gid.hpp"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

namespace mooncake::verbs {
namespace {

constexpr std::array<std::string_view, 13> kOverlays = {"docker", "cni",   "flannel", "cali",  "veth",
                                                        "br-",    "virbr", "kube",    "vxlan", "cilium",
                                                        "tun",    "weave", "lxc"};

bool overlay(std::string_view interface) {
  return std::any_of(kOverlays.begin(), kOverlays.end(),
                     [&](std::string_view prefix) { return interface.starts_with(prefix); });
}

bool mapped_ipv4(const ibv::Gid& gid) {
  constexpr uint8_t kPrefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  return std::memcmp(gid.raw, kPrefix, sizeof kPrefix) == 0;
}

bool link_local(const ibv::Gid& gid) {
  if (mapped_ipv4(gid)) return gid.raw[12] == 169 && gid.raw[13] == 254;
  return gid.raw[0] == 0xfe && (gid.raw[1] & 0xc0) == 0x80;
}

}  // namespace

int rank_of(const GidCandidate& candidate, bool ethernet) {
  constexpr ibv::Gid kNone{};
  if (std::memcmp(&candidate.gid, &kNone, sizeof kNone) == 0) return -1;
  if (!ethernet) return 0;
  int rank = link_local(candidate.gid) ? 2 : mapped_ipv4(candidate.gid) ? 0 : 1;
  if (candidate.type != ibv::kGidRoceV2) rank += 3;
  if (overlay(candidate.interface)) rank += 6;
  return rank;
}

const GidCandidate* best_gid(std::span<const GidCandidate> candidates, bool ethernet) {
  const GidCandidate* best = nullptr;
  for (const GidCandidate& next : candidates) {
    int rank = rank_of(next, ethernet);
    if (rank < 0) continue;
    int known = best == nullptr ? 0 : rank_of(*best, ethernet);
    if (best == nullptr || rank < known || (rank == known && next.index < best->index)) best = &next;
  }
  return best;
}

std::string text_of(const ibv::Gid& gid) {
  char text[INET6_ADDRSTRLEN] = "";
  inet_ntop(AF_INET6, gid.raw, text, sizeof text);
  return text;
}

}  // namespace mooncake::verbs
