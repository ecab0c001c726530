// Regions of the core itself: when they share a registration, and how long a key is waited for.
#pragma once

#include <sys/mman.h>

#include <memory>
#include <vector>

#include "fabric.hpp"
#include "region.hpp"

namespace checks {

namespace verbs = mooncake::verbs;

inline std::unique_ptr<verbs::Device> opened(verbs::Options& options) {
  options.library = library, options.device = "double0";
  std::unique_ptr<verbs::Device> device;
  require(verbs::Device::open(options, device).ok(), "the device opens");
  return device;
}

inline mc_memory described(const uint8_t* bytes, size_t length) {
  mc_memory memory{};
  memory.struct_size = sizeof memory;
  memory.fd = -1;
  memory.address = reinterpret_cast<uint64_t>(bytes);
  memory.length = length;
  return memory;
}

// revoke() waits for who is telling a peer of the key, and no longer than it may.
inline void check_revoke_deadline() {
  verbs::Options options;
  auto device = opened(options);
  verbs::Regions regions(device, options);
  std::vector<uint8_t> bytes(4096);
  mc_memory memory = described(bytes.data(), bytes.size());
  std::shared_ptr<verbs::Region> region;
  require(regions.add(memory, region).ok() && regions.expose(*region).ok(), "memory is registered");
  verbs::Opened told;
  require(regions.open(0, memory.key, told).ok(), "a peer is being told of its key");
  require(regions.revoke(*region, nullptr, now_ns() + 20'000'000).code == MC_TIMEOUT, "revoke() gives up");
  require(regions.revoke(*region, nullptr, 0).ok(), "and does not wait at all with 0");
  require(regions.revoke(*region, nullptr, now_ns() + 1).code == MC_TIMEOUT,
          "it remembers what it waits for");
  verbs::Opened other;
  require(regions.open(0, memory.key, other).code == MC_REFUSED, "nobody else is told");
  told.registration.reset();
  require(regions.revoke(*region, nullptr, now_ns() + kDeadlineNs).ok(), "until the answer is out");
  require(regions.remove(*region, now_ns() + kDeadlineNs).ok(), "and the memory is given back");
}

// A region within another is not pinned again. What is left of a region that is gone, because another still
// uses its registration, tells nothing of the memory that lies there later.
inline void check_shared_registration() {
  constexpr size_t kMiB = 1 << 20, kWhole = 16 * kMiB;
  verbs::Options options;
  auto device = opened(options);
  verbs::Regions regions(device, options);
  auto map = [](void* at, size_t length) {
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | (at == nullptr ? 0 : MAP_FIXED);
    void* mapped = mmap(at, length, PROT_READ | PROT_WRITE, flags, -1, 0);
    require(mapped != MAP_FAILED, "memory is mapped");
    return static_cast<uint8_t*>(mapped);
  };
  auto add = [&](const uint8_t* at, size_t length) {
    std::shared_ptr<verbs::Region> region;
    require(regions.add(described(at, length), region).ok(), "memory is registered");
    return region;
  };
  uint8_t* base = map(nullptr, kWhole);
  auto whole = add(base, kWhole), first = add(base, kMiB), last = add(base + kWhole - kMiB, kMiB);
  require(first->local == whole->local && last->local == whole->local,
          "regions within one share what it has");
  require(regions.remove(*whole, now_ns() + kDeadlineNs).ok(), "the outer one is given back");
  require(munmap(base + kMiB, kWhole - 2 * kMiB) == 0, "what no region covers is unmapped");
  map(base + kMiB, kWhole - 2 * kMiB);
  auto later = add(base + 2 * kMiB, kMiB);
  require(later->local != first->local, "new memory at an old address is registered");
  require(add(base, kMiB / 2)->local == first->local, "what is within one that is there is still shared");
  require(add(base + kMiB / 2, kMiB)->local != first->local, "and what reaches out of it is not");
  for (const auto& region : {first, last, later})
    require(regions.remove(*region, now_ns() + kDeadlineNs).ok(), "all is given back");
  require(add(base, kMiB)->local != first->local, "nothing is shared with what was given back");
  munmap(base, kWhole);
}

}  // namespace checks
