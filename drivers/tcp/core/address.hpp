// Socket addresses, and the blob by which a peer finds an endpoint.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "status.hpp"
#include "wire.hpp"

namespace mooncake_tcp {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  int family() const { return storage.ss_family; }
  uint16_t port() const;
  void set_port(uint16_t port);
  bool is_wildcard() const;
  bool is_loopback() const;
  bool is_link_local() const;
  // A link-local address is only good together with an interface of this machine: that of `own` when that is
  // one too; else the one that has this very address; else the only one that has any of the kind. Fails when
  // that leaves none, or several.
  Status take_scope(const SocketAddress& own);
  bool same_host_as(const SocketAddress& other) const;  // equal but for the port
  std::string host() const;                             // numeric
  std::string text() const;                             // host:port, [host]:port for IPv6
  const sockaddr* raw() const { return reinterpret_cast<const sockaddr*>(&storage); }
  sockaddr* raw() { return reinterpret_cast<sockaddr*>(&storage); }
};

// Numeric text to an address; false when it is not one.
bool parse_numeric(const std::string& host, uint16_t port, SocketAddress* address);
// Name or number to the first address this machine's resolver gives. May block: only for the local bind host.
Status resolve(const std::string& host, SocketAddress* address);
// Addresses of interfaces that are up: those other hosts can reach first, loopback last.
std::vector<SocketAddress> interface_addresses();
// Whether it is loopback, or one of this machine's own.
bool is_same_host(const SocketAddress& host, const std::vector<SocketAddress>& own_hosts);

// Where an endpoint listens, and the nonce that tells it from another one that listens there later.
struct EndpointAddress {
  Key nonce{};
  std::vector<SocketAddress> hosts;  // to try in this order, all with the same port
  bool encrypted = false;            // it speaks TLS
};

std::string encode_address(const EndpointAddress& address);
Status decode_address(const void* blob, size_t length, EndpointAddress* address);

}  // namespace mooncake_tcp
