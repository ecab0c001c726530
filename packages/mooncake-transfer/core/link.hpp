// One connection of a channel: its socket, what waits to be sent, and who waits for answers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "descriptor.hpp"
#include "notices.hpp"
#include "spin.hpp"
#include "status.hpp"
#include "support/tls.hpp"

namespace mooncake {

inline constexpr size_t kKeptBuffer = 1 << 20;  // a larger one is given back once it is empty

// The head of a frame. Numbers are little endian.
struct FrameHeader {
  uint32_t body_length;
  uint8_t version;
  uint8_t type;
  uint16_t method_length;
  uint64_t request;
};
static_assert(sizeof(FrameHeader) == 16);
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the wire format is little endian");

enum FrameType : uint8_t {
  kTypeHello = 1,
  kTypeHelloAck,
  kTypeRequest,
  kTypeReply,
  kTypeError,
  kTypeNotify,
  kTypeRefuse,  // why the accepting side ends the connection, as text
};

constexpr uint8_t kFrameVersion = 1;
// First bytes of TLS, by which an engine without it knows one with it and the other way round.
constexpr uint8_t kTlsHandshake = 0x16, kTlsMajor = 3;

// A request of this side that has not been answered yet; guarded by its link's mutex.
struct PendingCall {
  std::condition_variable answered;
  std::atomic<bool> done{false};  // may be read without
  bool remote_failed = false;
  Status status;
  std::string body;
  std::function<void(const std::string& reply)> then;  // instead of a thread that waits
};

struct Link {
  enum class Io { kSome, kNothing, kEnded };

  Link(Descriptor connected, uint64_t id, bool outgoing, std::string label)
      : socket(std::move(connected)), fd(socket.get()), id(id), outgoing(outgoing), label(std::move(label)) {}

  // All below: with the mutex held.

  // Finishes the accepting side's part of the TLS handshake as far as the socket lets it.
  Io shake_hands(Status* why);
  // kEnded when the connection is over, with the reason.
  Io receive(char* buffer, size_t capacity, size_t* bytes, Status* why);
  // Sends the frame, or keeps what the socket does not take now. False when the connection is broken: the
  // loop finds out why.
  bool send_frame(uint8_t type, uint64_t request, const std::string& method, const std::string& body);
  bool flush();
  size_t waiting_bytes() const { return unsent.size() - sent; }
  // Tells the kernel which events the loop wants.
  void watch(int epoll_fd);

  const Descriptor socket;
  const int fd;
  const uint64_t id;
  const bool outgoing;
  const std::string label;

  // Held by who reads the socket and takes frames: the loop, or a thread that polls. Locked before `mutex`.
  std::mutex reading;
  std::string received;
  SpinBudget spin;  // of threads that poll for its next frame

  // Touched by the loop only.
  uint64_t owed_since_ns = 0;  // since when it has been silent for too long and owes an answer; 0: it has not
  bool greeted = false;        // others may read it with the mutex held

  std::mutex mutex;
  std::condition_variable room;  // `unsent` went below half of its limit
  std::optional<tls::Session> session;
  bool shaking_hands = false;
  bool wants_write = false;  // the session has something to say before it can read on
  bool polled = false;       // a thread polls the socket; the loop need not wake up for it
  bool paused = false;       // its messages or answers pile up here, so nothing more is read
  uint32_t watched = 0;
  std::string unsent;
  size_t sent = 0;  // of `unsent`
  size_t queued_messages = 0, queued_bytes = 0;
  std::map<uint64_t, std::shared_ptr<PendingCall>> calls;
  uint64_t notified = 0;  // notifications that went over it, in or out
  // Of an incoming connection that may send notices: its token, what came, and what came too early: by how
  // many notifications go before it, method and body.
  std::string token;
  std::unique_ptr<NoticeWindow> window;
  std::multimap<uint64_t, std::pair<std::string, std::string>> early;
  bool closed = false;
  Status end;         // once closed
  std::string ended;  // why this side ended it; empty when it did not
  std::string hello;  // of an incoming connection
  size_t open_requests = 0;
  bool lost_pending = false;
};

}  // namespace mooncake
