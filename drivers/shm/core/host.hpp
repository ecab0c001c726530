// Where an endpoint can be reached: the address blob that travels to peers, and the identity of this host in
// it.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstdint>

#include "os.hpp"

namespace mooncake::shm {

constexpr size_t kSecretBytes = 16;

// Plain data: it is copied into the blob as it lies in memory, which the format number and the boot id make
// safe (both ends run on one machine).
struct Address {
  uint32_t format;
  uint32_t size;
  char boot_id[40];        // one boot of one kernel; two hosts never share it
  uint64_t net_namespace;  // abstract socket names are private to a network namespace; 0: unknown
  uint8_t name[kSecretBytes];
  // Whoever connects proves with the first that it was given this address; the endpoint proves with the
  // second that it is the one that made it, and not another process that took over a freed socket name.
  uint8_t initiator_secret[kSecretBytes];
  uint8_t target_secret[kSecretBytes];
};

// A new address for an endpoint of this process. Fails where /proc or random bytes are not to be had.
Status make_address(Address& address);

// Reads a peer's blob. MC_INVALID when it is none of ours, MC_UNREACHABLE when the peer is on another host or
// in another network namespace (`own` tells where we are).
Status read_address(const Address& own, const void* blob, size_t length, Address& peer);

// The abstract socket name of an address: it lies in no file system, so nothing remains of it after a crash.
socklen_t socket_name(const Address& address, sockaddr_un& name);

}  // namespace mooncake::shm
