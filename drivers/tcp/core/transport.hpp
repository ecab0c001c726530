// A connected socket, plain or under TLS.
#pragma once

#include <sys/socket.h>
#include <sys/uio.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "descriptor.hpp"
#include "support/tls.hpp"

namespace mooncake_tcp {

// Non-blocking. One thread at a time.
class Transport {
 public:
  enum class Side { kConnecting, kAccepting };

  int fd() const { return socket_.get(); }
  bool valid() const { return socket_.valid(); }
  // Without a context the bytes go as they are.
  void open(Descriptor socket, const mooncake::tls::Context* tls, Side side);
  void close();
  bool encrypted() const { return tls_.has_value(); }

  // As sendmsg(2) and recvmsg(2): bytes moved, or -1 and errno; what was sent may be read no more. `receive`
  // gives less than asked only when there is no more.
  ssize_t send(iovec* vectors, size_t count);
  ssize_t receive(iovec* vectors, size_t count);
  // Sends what send() took and the socket did not. False: it still does not, or errno is set.
  bool push();
  bool pending() const { return staged_begin_ != staged_end_; }
  // Whether it waits for room in the socket.
  bool wants_room() const { return wants_room_; }
  // Of the last failure.
  std::string reason(int error) const;

 private:
  ssize_t failed(mooncake::tls::Outcome outcome);

  Descriptor socket_;
  std::optional<mooncake::tls::Session> tls_;
  std::vector<std::byte> staged_;  // of TLS only
  size_t staged_begin_ = 0;
  size_t staged_end_ = 0;
  bool wants_room_ = false;
};

}  // namespace mooncake_tcp
