// What goes over a connection, and how whole messages get through a socket.
//
// An operation takes these steps; each side waits for the other, so one operation is under way on a
// connection:
//   initiator: Request                 target: Reply (a refusal ends it)
//   read:                              target: the bytes
//   write:     the bytes               target: Reply, once they are in memory
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "mooncake_driver.h"
#include "support/status.hpp"

namespace template_driver {

using mooncake::driver::failed;
using mooncake::driver::Status;

// Both ends run on one machine, so the structs travel as they lie in memory. On a network: fix the byte
// order.
struct Request {
  uint32_t magic;
  uint32_t opcode;  // mc_opcode
  uint64_t region_id;
  uint64_t offset;
  uint64_t length;
  uint8_t key[MC_KEY_BYTES];
  uint64_t session;  // random, of the initiator's connection, whatever socket it uses now
};

struct Reply {
  int32_t status;  // mc_status
  char reason[MC_REASON_MAX];
};

constexpr uint32_t kMagic = 0x6d637431;

Reply make_reply(const Status& status);
Status status_of(const Reply& reply);

// False when the other side is gone, or silent for longer than the socket's timeouts. Receiving also ends
// once `ended` is set: a local socket still hands out what came before its end.
bool send_all(int socket, const void* bytes, size_t length);
bool receive_all(int socket, void* bytes, size_t length, const std::atomic<bool>* ended = nullptr);

}  // namespace template_driver
