#include "address.hpp"

#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <cerrno>

#include "support/os.hpp"

namespace mooncake::verbs {
namespace {

constexpr uint32_t kAddressMagic = 0x4156434d;  // "MCVA"
constexpr uint8_t kVersion = 1;
constexpr size_t kMaxHosts = 8;

std::string text_of(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST] = "";
  getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST);
  return host;
}

bool wildcard(const SocketAddress& address) {
  if (address.storage.ss_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(&address.storage)->sin_addr.s_addr == INADDR_ANY;
  return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&address.storage)->sin6_addr);
}

void add_interfaces(int family, std::vector<std::string>& hosts) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return;
  for (ifaddrs* next = list; next != nullptr; next = next->ifa_next) {
    if (next->ifa_addr == nullptr || (next->ifa_flags & IFF_UP) == 0) continue;
    if ((next->ifa_flags & IFF_LOOPBACK) != 0 || hosts.size() >= kMaxHosts) continue;
    int own = next->ifa_addr->sa_family;
    if (own == AF_INET) hosts.push_back(text_of(next->ifa_addr, sizeof(sockaddr_in)));
    if (own == AF_INET6 && family == AF_INET6) hosts.push_back(text_of(next->ifa_addr, sizeof(sockaddr_in6)));
  }
  freeifaddrs(list);
  if (hosts.empty()) hosts.push_back(family == AF_INET6 ? "::1" : "127.0.0.1");
}

}  // namespace

std::string encode(const Address& address) {
  Writer writer(Message::kHello);
  writer.number(kAddressMagic).number(kVersion).bytes(address.nonce.data(), address.nonce.size());
  writer.number(address.port).number(static_cast<uint8_t>(address.hosts.size()));
  for (const std::string& host : address.hosts)
    writer.number(static_cast<uint8_t>(host.size())).bytes(host.data(), host.size());
  return writer.finish().substr(kHeaderBytes);
}

Status decode(std::string_view blob, Address& address) {
  Reader reader(blob);
  uint32_t magic = 0;
  uint8_t version = 0, count = 0;
  reader.number(&magic);
  reader.number(&version);
  reader.bytes(address.nonce.data(), address.nonce.size());
  reader.number(&address.port);
  reader.number(&count);
  for (uint8_t i = 0; i < count && reader.ok(); ++i) {
    uint8_t length = 0;
    reader.number(&length);
    std::string host(length, '\0');
    reader.bytes(host.data(), length);
    address.hosts.push_back(std::move(host));
  }
  if (!reader.ok() || magic != kAddressMagic || address.hosts.empty())
    return failed(MC_INVALID, std::to_string(blob.size()) + " bytes are no address of a verbs endpoint");
  if (version != kVersion)
    return failed(MC_INVALID, "the peer's verbs driver speaks version " + std::to_string(version) +
                                  " of the control protocol, this one " + std::to_string(kVersion));
  return {};
}

Status resolve(const std::string& host, uint16_t port, SocketAddress& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  int error = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (error != 0) return failed(MC_IO, "cannot resolve '" + host + "': " + gai_strerror(error));
  std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
  address.length = found->ai_addrlen;
  freeaddrinfo(found);
  return {};
}

Status listen_at(const std::string& host, uint16_t port, driver::UniqueFd& fd, Address& address) {
  SocketAddress at;
  if (Status status = resolve(host, port, at); !status.ok()) return status;
  driver::UniqueFd made(socket(at.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!made.valid()) return system_failure(MC_IO, "cannot create a socket", errno);
  int on = 1;
  setsockopt(made.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  auto* name = reinterpret_cast<sockaddr*>(&at.storage);
  if (bind(made.get(), name, at.length) != 0 || listen(made.get(), 1024) != 0)
    return system_failure(MC_IO, "cannot listen at " + host + ":" + std::to_string(port), errno);
  if (getsockname(made.get(), name, &at.length) != 0)
    return system_failure(MC_IO, "cannot learn the port of a socket", errno);
  // Port and family lie at the same place in both kinds of addresses.
  address.port = ntohs(reinterpret_cast<sockaddr_in*>(&at.storage)->sin_port);
  if (wildcard(at)) {
    add_interfaces(at.storage.ss_family, address.hosts);
  } else {
    address.hosts.push_back(text_of(name, at.length));
  }
  fd = std::move(made);
  return {};
}

}  // namespace mooncake::verbs
