#include "wire.hpp"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace template_driver {

Reply make_reply(const Status& status) {
  Reply reply{};
  reply.status = status.code;
  std::strncpy(reply.reason, status.reason.c_str(), sizeof reply.reason - 1);
  return reply;
}

Status status_of(const Reply& reply) {
  return {static_cast<mc_status>(reply.status),
          std::string(reply.reason, strnlen(reply.reason, sizeof reply.reason))};
}

bool send_all(int socket, const void* bytes, size_t length) {
  auto* next = static_cast<const char*>(bytes);
  while (length > 0) {
    ssize_t sent = send(socket, next, length, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    next += sent;
    length -= static_cast<size_t>(sent);
  }
  return true;
}

bool receive_all(int socket, void* bytes, size_t length, const std::atomic<bool>* ended) {
  auto* next = static_cast<char*>(bytes);
  while (length > 0) {
    if (ended != nullptr && *ended) return false;
    ssize_t received = recv(socket, next, length, 0);
    if (received < 0 && errno == EINTR) continue;
    if (received <= 0) return false;
    next += received;
    length -= static_cast<size_t>(received);
  }
  return true;
}

}  // namespace template_driver
