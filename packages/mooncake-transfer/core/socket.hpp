// TCP sockets of the channel.
#pragma once

#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "descriptor.hpp"
#include "status.hpp"

namespace mooncake {

// "host:port", with brackets around an IPv6 address.
std::string where(const std::string& host, uint16_t port);
std::string where(const sockaddr_storage& address);
// Listens on the first free port of port..last_port (port 0: any); gives the socket (non-blocking) and the
// port.
Status listen_on(const std::string& host, uint16_t port, uint16_t last_port, Descriptor* socket,
                 uint16_t* bound_port);
// Connects within the deadline, which holds for looking the name up as well; gives a non-blocking socket.
Status connect_to(const std::string& host, uint16_t port, uint64_t deadline_ns, Descriptor* socket);
// No delay, and keep-alive probes by which an idle connection to a host that is gone ends after `silence_s`.
void tune_stream(int fd, double silence_s);
// Milliseconds from now to the deadline, rounded up, for poll(2).
int poll_timeout_ms(uint64_t deadline_ns);

}  // namespace mooncake
