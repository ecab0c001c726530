// Where an endpoint can be reached by its peers' control connections: the address blob that travels, and the
// identity of this host in it.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include <cstdint>
#include <string>

#include "../os.hpp"

namespace mooncake::driver {

constexpr size_t kSecretBytes = 16;

// Plain data: copied into the blob as it lies in memory; the format number tells byte orders apart.
struct Address {
  uint32_t format;
  uint32_t size;
  char driver[16];         // two drivers do not talk to each other
  char boot_id[40];        // one boot of one kernel; two hosts never share it
  uint64_t net_namespace;  // abstract socket names are private to a network namespace; 0: unknown
  uint8_t name[kSecretBytes];
  // Whoever connects proves with the first that it was given this address; the endpoint proves with the
  // second that it is the one that made it, and not another process that took over a freed socket name.
  uint8_t initiator_secret[kSecretBytes];
  uint8_t target_secret[kSecretBytes];
  uint8_t host[16];  // of the TCP listener, v4 addresses mapped into v6; all zero: there is none
  uint16_t port;     // 0: there is none
  uint16_t reserved[3];
  uint8_t extra[64];  // what the driver adds
};

// A new address for an endpoint of this process. Fails where /proc or random bytes are not to be had.
Status make_address(const char* driver, Address& address);

// Reads a peer's blob. MC_INVALID when it is none of this driver.
Status read_address(const Address& own, const void* blob, size_t length, Address& peer);

// Whether one kernel runs both: then what keeps them apart is how they were started.
bool same_boot(const Address& own, const Address& peer);

// Whether a unix socket of one can be reached from the other.
bool same_host(const Address& own, const Address& peer);

// The abstract socket name of an address: it lies in no file system, so nothing remains of it after a crash.
socklen_t socket_name(const Address& address, sockaddr_un& name);
socklen_t socket_address(const Address& address, sockaddr_storage& made);

// A numeric IPv4 or IPv6 address, as v6. MC_INVALID for anything else.
Status parse_host(const std::string& host, uint8_t (&bytes)[16]);

// A descriptor that becomes readable when the process ends; invalid where the kernel or the namespace has
// none.
UniqueFd open_pidfd(pid_t pid);

}  // namespace mooncake::driver
