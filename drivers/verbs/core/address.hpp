// Where an endpoint is reached, as peers get it.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <string>
#include <vector>

#include "support/os.hpp"
#include "wire.hpp"

namespace mooncake::verbs {

// An address blob: "MCVA", version (u8), nonce, port (u16), count (u8), each host as length (u8) and text.
struct Address {
  Nonce nonce{};  // random for each endpoint: a successor at the same port is not taken for it
  uint16_t port = 0;
  std::vector<std::string> hosts;  // numeric
};

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
};

std::string encode(const Address& address);
// MC_INVALID when it is none.
Status decode(std::string_view blob, Address& address);

// Resolves a name or a numeric address. MC_IO with the reason.
Status resolve(const std::string& host, uint16_t port, SocketAddress& address);
// A socket that listens there, and the hosts to tell peers: for a wildcard every address of the machine.
Status listen_at(const std::string& host, uint16_t port, driver::UniqueFd& fd, Address& address);

}  // namespace mooncake::verbs
