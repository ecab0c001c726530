#include "host.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

namespace mooncake::nvmeof {
namespace {

struct Known {
  std::weak_ptr<Owner> owner;
  std::weak_ptr<Io> io;
};

struct Registry {
  std::mutex mutex;
  std::map<EndpointId, Known> known;
};

// Never destroyed: endpoints may be closed after static destructors have run.
Registry& registry() {
  static auto* all = new Registry;
  return *all;
}

std::vector<std::shared_ptr<Io>> everyone() {
  std::vector<std::shared_ptr<Io>> all;
  std::lock_guard lock(registry().mutex);
  for (auto& [id, known] : registry().known) {
    if (auto io = known.io.lock()) all.push_back(std::move(io));
  }
  return all;
}

}  // namespace

Status make_address(Address& address) {
  std::memset(&address, 0, sizeof address);
  address.magic = kAddressMagic;
  address.version = kAddressVersion;
  UniqueFd file(open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC));
  char text[64] = {};
  ssize_t length = file.valid() ? read(file.get(), text, sizeof text - 1) : -1;
  if (length < 36) return failed(MC_UNSUPPORTED, "cannot read /proc/sys/kernel/random/boot_id; mount /proc");
  size_t nibbles = 0;
  for (char letter : std::string(text, 36)) {
    int value = letter >= 'a' ? letter - 'a' + 10 : letter - '0';
    if (letter == '-' || nibbles >= 32) continue;
    address.host[nibbles / 2] = static_cast<uint8_t>(address.host[nibbles / 2] << 4 | (value & 15));
    ++nibbles;
  }
  return fill_random(address.endpoint.data(), address.endpoint.size());
}

void announce(const EndpointId& id, const std::shared_ptr<Owner>& owner, const std::shared_ptr<Io>& io) {
  std::lock_guard lock(registry().mutex);
  registry().known[id] = {owner, io};
}

void withdraw(const EndpointId& id) {
  std::lock_guard lock(registry().mutex);
  registry().known.erase(id);
}

std::shared_ptr<Owner> find_owner(const EndpointId& id) {
  std::lock_guard lock(registry().mutex);
  auto found = registry().known.find(id);
  return found == registry().known.end() ? nullptr : found->second.owner.lock();
}

void reap_all() {
  for (auto& io : everyone()) io->reap();
}

void forget_everywhere(Device& device) {
  for (auto& io : everyone()) io->forget(device);
}

}  // namespace mooncake::nvmeof
