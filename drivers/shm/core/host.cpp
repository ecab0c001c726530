#include "host.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>

#include "os.hpp"

namespace mooncake::shm {
namespace {

constexpr uint32_t kAddressFormat = 0x4d435301;  // "MCS", 1
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

Status make_address(Address& address) {
  std::memset(&address, 0, sizeof address);
  address.format = kAddressFormat;
  address.size = sizeof address;
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
  if (blob == nullptr || length != sizeof peer) {
    return failed(MC_INVALID, "not an address of the shm driver: it has " + std::to_string(length) +
                                  " bytes, not " + std::to_string(sizeof peer));
  }
  std::memcpy(&peer, blob, sizeof peer);
  if (peer.format != kAddressFormat || peer.size != sizeof peer) {
    return failed(MC_INVALID, "not an address of this version of the shm driver");
  }
  if (std::memcmp(own.boot_id, peer.boot_id, sizeof own.boot_id) != 0) {
    return failed(MC_UNREACHABLE, "the peer runs on another host; shared memory ends at this one");
  }
  if (own.net_namespace != 0 && peer.net_namespace != 0 && own.net_namespace != peer.net_namespace) {
    return failed(MC_UNREACHABLE,
                  "the peer runs in another network namespace of this host, where the shm driver's "
                  "socket name is unknown");
  }
  return {};
}

socklen_t socket_name(const Address& address, sockaddr_un& name) {
  static constexpr char kPrefix[] = "mooncake-shm-";
  static constexpr char kDigits[] = "0123456789abcdef";
  std::memset(&name, 0, sizeof name);
  name.sun_family = AF_UNIX;
  char* out = name.sun_path + 1;  // the zero before it makes the name abstract
  std::memcpy(out, kPrefix, sizeof kPrefix - 1);
  out += sizeof kPrefix - 1;
  for (uint8_t byte : address.name) {
    *out++ = kDigits[byte >> 4];
    *out++ = kDigits[byte & 15];
  }
  return static_cast<socklen_t>(out - reinterpret_cast<char*>(&name));
}

}  // namespace mooncake::shm
