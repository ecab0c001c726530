// One control socket: whole messages in both directions, without ever waiting.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "support/os.hpp"
#include "wire.hpp"

namespace mooncake::verbs {

class Channel {
 public:
  explicit Channel(driver::UniqueFd fd) : fd_(std::move(fd)) {}

  // Keeps watch over a peer that vanishes without a word.
  void watch(uint32_t dead_peer_timeout_ms);

  // Reads what has come. False when the connection has ended; reason() tells how.
  bool receive();
  // The next whole message. False when there is none, or when what came is none: then failed() is true.
  bool next(Message* kind, std::string* payload);
  bool failed() const { return !reason_.empty(); }
  const std::string& reason() const { return reason_; }

  // False when the connection has ended.
  bool send(std::string_view bytes);
  bool flush() { return send({}); }
  bool wants_to_write() const { return !out_.empty(); }
  size_t unsent() const { return out_.size(); }
  int fd() const { return fd_.get(); }

 private:
  driver::UniqueFd fd_;
  std::string in_, out_;
  std::string reason_;
};

}  // namespace mooncake::verbs
