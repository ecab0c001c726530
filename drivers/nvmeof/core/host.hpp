// The endpoints of this process.
#pragma once

#include <array>
#include <cstdint>
#include <memory>

#include "io.hpp"
#include "region.hpp"
#include "support/peers/address.hpp"

namespace mooncake::nvmeof {

using EndpointId = std::array<uint8_t, driver::kSecretBytes>;

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
