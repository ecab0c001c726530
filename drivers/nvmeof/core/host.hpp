// The endpoints of this process, and what tells one host from another.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "io.hpp"
#include "region.hpp"

namespace mooncake::nvmeof {

using EndpointId = std::array<uint8_t, 16>;

// What peers connect to, as it lies in memory.
struct Address {
  uint32_t magic;
  uint32_t version;
  uint8_t host[16];  // of this boot of this kernel
  EndpointId endpoint;
};
constexpr uint32_t kAddressMagic = 0x666f766e;
constexpr uint32_t kAddressVersion = 1;

Status make_address(Address& address);

// Thread-safe; holds no endpoint.
void announce(const EndpointId& id, const std::shared_ptr<Owner>& owner, const std::shared_ptr<Io>& io);
void withdraw(const EndpointId& id);
std::shared_ptr<Owner> find_owner(const EndpointId& id);
// Takes what the kernel has finished for any endpoint of the process, so that who waits for the last
// operation of a peer does not depend on that peer's polling.
void reap_all();
// No endpoint of the process holds on to a device that its owner gives back.
void forget_everywhere(Device& device);

}  // namespace mooncake::nvmeof
