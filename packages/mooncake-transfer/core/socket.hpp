// TCP sockets of the channel.
#pragma once

#include <cstdint>
#include <string>

#include "descriptor.hpp"
#include "status.hpp"

namespace mooncake {

// Listens on host:port (port 0: any); gives the socket (non-blocking) and the port.
Status listen_on(const std::string& host, uint16_t port, Descriptor* socket, uint16_t* bound_port);
// Connects within the deadline; gives a non-blocking socket with keep-alive and no Nagle delay.
Status connect_to(const std::string& host, uint16_t port, uint64_t deadline_ns, Descriptor* socket);
// Non-blocking, no delay, and noticed as dead within about 15 s when the other host vanishes.
void tune_stream(int fd);
// Milliseconds from now to the deadline, rounded up, for poll(2).
int poll_timeout_ms(uint64_t deadline_ns);

}  // namespace mooncake
