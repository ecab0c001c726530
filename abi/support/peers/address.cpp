#include "address.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace mooncake::driver {
namespace {

constexpr uint32_t kAddressFormat = 0x4d434101;  // "MCA", 1
constexpr const char* kBootIdPath = "/proc/sys/kernel/random/boot_id";

Status read_boot_id(char (&boot_id)[40]) {
  UniqueFd file(open(kBootIdPath, O_RDONLY | O_CLOEXEC));
  if (!file.valid()) return system_failure(MC_UNSUPPORTED, std::string("cannot open ") + kBootIdPath, errno);
  std::memset(boot_id, 0, sizeof boot_id);
  ssize_t length = read(file.get(), boot_id, sizeof boot_id - 1);
  if (length < 36) return failed(MC_UNSUPPORTED, std::string(kBootIdPath) + " holds no boot id");
  boot_id[36] = 0;  // drops the newline
  return {};
}

}  // namespace

Status make_address(const char* driver, Address& address) {
  std::memset(&address, 0, sizeof address);
  address.format = kAddressFormat;
  address.size = sizeof address;
  std::strncpy(address.driver, driver, sizeof address.driver - 1);
  if (Status status = read_boot_id(address.boot_id); !status.ok()) return status;
  struct stat link{};
  if (stat("/proc/self/ns/net", &link) == 0) address.net_namespace = link.st_ino;
  uint8_t random[3 * kSecretBytes];
  if (Status status = fill_random(random, sizeof random); !status.ok()) return status;
  std::memcpy(address.name, random, kSecretBytes);
  std::memcpy(address.initiator_secret, random + kSecretBytes, kSecretBytes);
  std::memcpy(address.target_secret, random + 2 * kSecretBytes, kSecretBytes);
  return {};
}

Status read_address(const Address& own, const void* blob, size_t length, Address& peer) {
  std::string what = std::string("not an address of the ") + own.driver + " driver";
  if (length != sizeof peer) {
    return failed(MC_INVALID,
                  what + ": it has " + std::to_string(length) + " bytes, not " + std::to_string(sizeof peer));
  }
  std::memcpy(&peer, blob, sizeof peer);
  bool ours = peer.format == kAddressFormat && peer.size == sizeof peer &&
              std::memcmp(peer.driver, own.driver, sizeof own.driver) == 0;
  return ours ? Status{} : failed(MC_INVALID, what + " of this version");
}

bool same_boot(const Address& own, const Address& peer) {
  return std::memcmp(own.boot_id, peer.boot_id, sizeof own.boot_id) == 0;
}

bool same_host(const Address& own, const Address& peer) {
  return same_boot(own, peer) &&
         (own.net_namespace == 0 || peer.net_namespace == 0 || own.net_namespace == peer.net_namespace);
}

socklen_t socket_name(const Address& address, sockaddr_un& name) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::memset(&name, 0, sizeof name);
  name.sun_family = AF_UNIX;
  char* out = name.sun_path + 1;  // the zero before it makes the name abstract
  std::string prefix = "mooncake-" + std::string(address.driver) + "-";
  out = std::copy(prefix.begin(), prefix.end(), out);
  for (uint8_t byte : address.name) {
    *out++ = kDigits[byte >> 4];
    *out++ = kDigits[byte & 15];
  }
  return static_cast<socklen_t>(out - reinterpret_cast<char*>(&name));
}

socklen_t socket_address(const Address& address, sockaddr_storage& made) {
  made = {};
  static constexpr uint8_t kMapped[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
  if (std::memcmp(address.host, kMapped, sizeof kMapped) == 0) {  // works where IPv6 is switched off
    auto& v4 = reinterpret_cast<sockaddr_in&>(made);
    v4.sin_family = AF_INET;
    v4.sin_port = htons(address.port);
    std::memcpy(&v4.sin_addr, address.host + 12, sizeof v4.sin_addr);
    return sizeof v4;
  }
  auto& v6 = reinterpret_cast<sockaddr_in6&>(made);
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(address.port);
  std::memcpy(&v6.sin6_addr, address.host, sizeof address.host);
  return sizeof v6;
}

Status parse_host(const std::string& host, uint8_t (&bytes)[16]) {
  in_addr v4{};
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) {
    std::memset(bytes, 0, sizeof bytes);
    bytes[10] = bytes[11] = 0xff;
    std::memcpy(bytes + 12, &v4, sizeof v4);
    return {};
  }
  if (inet_pton(AF_INET6, host.c_str(), bytes) == 1) return {};
  return failed(MC_INVALID, "host '" + host + "' is no numeric IPv4 or IPv6 address");
}

UniqueFd open_pidfd(pid_t pid) {
  if (pid <= 0) return {};
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace mooncake::driver
