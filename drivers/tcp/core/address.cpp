#include "address.hpp"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>

#include <algorithm>
#include <memory>
#include <set>

namespace mooncake_tcp {

namespace {

constexpr size_t kMagicBytes = 4;
constexpr char kPlainMagic[] = "MCTA", kEncryptedMagic[] = "MCTS";
constexpr size_t kMaxHosts = 12;  // of at most INET6_ADDRSTRLEN bytes, which keeps the blob below MC_BLOB_MAX

const sockaddr_in& v4(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in&>(address.storage);
}
const sockaddr_in6& v6(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in6&>(address.storage);
}

SocketAddress copy_of(const sockaddr* raw, socklen_t length) {
  SocketAddress address;
  memcpy(&address.storage, raw, length);
  address.length = length;
  return address;
}

std::vector<SocketAddress> all_addresses() {
  ifaddrs* first = nullptr;
  if (getifaddrs(&first) != 0) return {};
  std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owner(first, freeifaddrs);
  std::vector<SocketAddress> addresses;
  for (const ifaddrs* entry = first; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    int family = entry->ifa_addr->sa_family;
    if (family == AF_INET) addresses.push_back(copy_of(entry->ifa_addr, sizeof(sockaddr_in)));
    if (family == AF_INET6) addresses.push_back(copy_of(entry->ifa_addr, sizeof(sockaddr_in6)));
  }
  return addresses;
}

int reach(const SocketAddress& address) {
  if (address.is_loopback()) return 2;
  return address.family() == AF_INET ? 0 : 1;
}

}  // namespace

uint16_t SocketAddress::port() const {
  return ntohs(family() == AF_INET ? v4(*this).sin_port : v6(*this).sin6_port);
}

void SocketAddress::set_port(uint16_t port) {
  if (family() == AF_INET) {
    reinterpret_cast<sockaddr_in&>(storage).sin_port = htons(port);
  } else {
    reinterpret_cast<sockaddr_in6&>(storage).sin6_port = htons(port);
  }
}

bool SocketAddress::is_wildcard() const {
  if (family() == AF_INET) return v4(*this).sin_addr.s_addr == htonl(INADDR_ANY);
  return IN6_IS_ADDR_UNSPECIFIED(&v6(*this).sin6_addr);
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET) return (ntohl(v4(*this).sin_addr.s_addr) >> 24) == 127;
  return IN6_IS_ADDR_LOOPBACK(&v6(*this).sin6_addr);
}

bool SocketAddress::is_link_local() const {
  return family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&v6(*this).sin6_addr);
}

Status SocketAddress::take_scope(const SocketAddress& own) {
  if (!is_link_local()) return {};
  uint32_t& scope = reinterpret_cast<sockaddr_in6&>(storage).sin6_scope_id;
  scope = own.is_link_local() ? v6(own).sin6_scope_id : 0;
  if (scope != 0) return {};
  std::set<uint32_t> able, holding;
  for (const SocketAddress& address : all_addresses()) {
    if (!address.is_link_local()) continue;
    able.insert(v6(address).sin6_scope_id);
    if (same_host_as(address)) holding.insert(v6(address).sin6_scope_id);
  }
  const auto& interfaces = holding.empty() ? able : holding;
  if (interfaces.size() != 1) {
    return {MC_UNREACHABLE, std::to_string(interfaces.size()) +
                                " interfaces could lead to this link-local address; name one in the option "
                                "interfaces, or in host (fe80::1%eth0)"};
  }
  scope = *interfaces.begin();
  return {};
}

bool SocketAddress::same_host_as(const SocketAddress& other) const {
  if (family() != other.family()) return false;
  if (family() == AF_INET) return v4(*this).sin_addr.s_addr == v4(other).sin_addr.s_addr;
  return IN6_ARE_ADDR_EQUAL(&v6(*this).sin6_addr, &v6(other).sin6_addr);
}

std::string SocketAddress::host() const {
  char text[INET6_ADDRSTRLEN] = "";
  const void* raw_host =
      family() == AF_INET ? static_cast<const void*>(&v4(*this).sin_addr) : &v6(*this).sin6_addr;
  inet_ntop(family(), raw_host, text, sizeof(text));
  return text;
}

std::string SocketAddress::text() const {
  std::string shown = family() == AF_INET6 ? "[" + host() + "]" : host();
  return shown + ":" + std::to_string(port());
}

bool parse_numeric(const std::string& host, uint16_t port, SocketAddress* address) {
  SocketAddress parsed;
  auto& four = reinterpret_cast<sockaddr_in&>(parsed.storage);
  auto& six = reinterpret_cast<sockaddr_in6&>(parsed.storage);
  if (inet_pton(AF_INET, host.c_str(), &four.sin_addr) == 1) {
    four.sin_family = AF_INET;
    parsed.length = sizeof(four);
  } else if (inet_pton(AF_INET6, host.c_str(), &six.sin6_addr) == 1) {
    six.sin6_family = AF_INET6;
    parsed.length = sizeof(six);
  } else {
    return false;
  }
  parsed.set_port(port);
  *address = parsed;
  return true;
}

Status resolve(const std::string& host, SocketAddress* address) {
  if (parse_numeric(host, 0, address)) return {};
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  int error = getaddrinfo(host.c_str(), nullptr, &hints, &found);
  if (error != 0) return {MC_INVALID, "host " + host + " does not resolve: " + gai_strerror(error)};
  std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, freeaddrinfo);
  *address = copy_of(found->ai_addr, found->ai_addrlen);
  return {};
}

std::vector<SocketAddress> interface_addresses() {
  std::vector<SocketAddress> addresses = all_addresses();
  // They are good on one link only, and a peer would have to guess at which of its own.
  std::erase_if(addresses, [](const SocketAddress& address) { return address.is_link_local(); });
  std::stable_sort(addresses.begin(), addresses.end(),
                   [](const SocketAddress& a, const SocketAddress& b) { return reach(a) < reach(b); });
  return addresses;
}

bool is_same_host(const SocketAddress& host, const std::vector<SocketAddress>& own_hosts) {
  return host.is_loopback() || std::any_of(own_hosts.begin(), own_hosts.end(),
                                           [&](const auto& own) { return own.same_host_as(host); });
}

// Blob: magic[4] (another one where TLS is spoken), nonce[16], port (u16, little-endian), number of hosts
// (u8), then each host as length (u8) and text.
std::string encode_address(const EndpointAddress& address) {
  std::string blob(address.encrypted ? kEncryptedMagic : kPlainMagic);
  blob.append(reinterpret_cast<const char*>(address.nonce.data()), address.nonce.size());
  size_t count = std::min(address.hosts.size(), kMaxHosts);
  uint16_t port = count == 0 ? 0 : address.hosts[0].port();
  blob.push_back(static_cast<char>(port & 0xff));
  blob.push_back(static_cast<char>(port >> 8));
  blob.push_back(static_cast<char>(count));
  for (size_t i = 0; i < count; ++i) {
    std::string host = address.hosts[i].host();
    blob.push_back(static_cast<char>(host.size()));
    blob += host;
  }
  return blob;
}

Status decode_address(const void* blob, size_t length, EndpointAddress* address) {
  constexpr size_t kFixed = kMagicBytes + MC_KEY_BYTES + 3;
  const Status wrong{MC_INVALID, "this is not the address of a tcp endpoint"};
  const auto* bytes = static_cast<const uint8_t*>(blob);
  if (bytes == nullptr || length < kFixed) return wrong;
  EndpointAddress decoded;
  decoded.encrypted = memcmp(bytes, kEncryptedMagic, kMagicBytes) == 0;
  if (!decoded.encrypted && memcmp(bytes, kPlainMagic, kMagicBytes) != 0) return wrong;
  memcpy(decoded.nonce.data(), bytes + kMagicBytes, MC_KEY_BYTES);
  const uint8_t* at = bytes + kMagicBytes + MC_KEY_BYTES;
  auto port = static_cast<uint16_t>(at[0] | at[1] << 8);
  size_t count = at[2];
  size_t position = kFixed;
  for (size_t i = 0; i < count; ++i) {
    if (position >= length || bytes[position] > length - position - 1) return wrong;
    std::string host(reinterpret_cast<const char*>(bytes + position + 1), bytes[position]);
    position += 1 + host.size();
    SocketAddress parsed;
    if (!parse_numeric(host, port, &parsed)) return wrong;
    decoded.hosts.push_back(parsed);
  }
  if (position != length || decoded.hosts.empty() || port == 0) return wrong;
  *address = std::move(decoded);
  return {};
}

}  // namespace mooncake_tcp
