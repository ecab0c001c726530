// One connection, a header of 64 bytes, the bytes, an answer of 64 bytes, and two sides that never sleep: the
// bound of any transfer over one connection.
#include <sys/socket.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>

namespace {

struct Header {
  uint64_t is_read;
  uint64_t length;
  char rest[48];
};
static_assert(sizeof(Header) == 64);

bool send_all(int fd, const void* from, std::size_t length) {
  const char* at = static_cast<const char*>(from);
  while (length > 0) {
    ssize_t sent = send(fd, at, length, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (sent <= 0) return false;
    at += sent;
    length -= static_cast<std::size_t>(sent);
  }
  return true;
}

bool receive_all(int fd, void* to, std::size_t length) {
  char* at = static_cast<char*>(to);
  while (length > 0) {
    ssize_t received = recv(fd, at, length, MSG_DONTWAIT);
    if (received < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (received <= 0) return false;
    at += received;
    length -= static_cast<std::size_t>(received);
  }
  return true;
}

}  // namespace

// Moves `length` bytes to or from the other side. False: the connection is gone.
extern "C" bool plain_socket_move(int fd, void* memory, std::size_t length, bool is_read) {
  Header header{is_read, length, {}};
  if (!send_all(fd, &header, sizeof(header))) return false;
  if (!is_read && !send_all(fd, memory, length)) return false;
  if (!receive_all(fd, &header, sizeof(header))) return false;
  return !is_read || receive_all(fd, memory, length);
}

// Answers until the connection ends, or something longer than `capacity` is asked for.
extern "C" void plain_socket_serve(int fd, void* memory, std::size_t capacity) {
  Header header;
  while (receive_all(fd, &header, sizeof(header)) && header.length <= capacity) {
    if (!header.is_read && !receive_all(fd, memory, header.length)) return;
    if (!send_all(fd, &header, sizeof(header))) return;
    if (header.is_read && !send_all(fd, memory, header.length)) return;
  }
}
