// One queue of an NVMe/TCP controller: a connection, the commands on it, and the PDUs that they are made of.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "nvme_wire.hpp"
#include "os.hpp"

namespace mooncake::nvmeof::nvme {

struct Command {
  Command* next = nullptr;  // of those that wait for a queue
  Submission entry{};
  std::byte* memory = nullptr;  // that data comes from or goes to
  uint32_t length = 0;
  bool to_target = false;
  bool sync = false;      // somebody waits for `over`
  bool over = false;      // guarded by the mutex of the controller, as are the next two
  Status status;          // of the transport or, in words, of the target
  uint64_t value = 0;     // of the result
  void* owner = nullptr;  // of an operation's command
  uint64_t begun_ns = 0;
  uint32_t moved = 0;
};

struct QueueSettings {
  std::string host, port;
  bool header_digest = false, data_digest = false;
  uint16_t depth = 128;
};

// Not thread-safe.
class Queue {
 public:
  // TCP, ICReq and ICResp.
  Status connect(const QueueSettings& settings, uint64_t deadline_ns);
  // For a socket that is past that.
  void adopt(UniqueFd socket, uint16_t depth, uint8_t digests, uint32_t most_data);

  int fd() const { return socket_.get(); }
  void set_in_capsule(uint32_t bytes) { in_capsule_ = bytes; }
  void set_depth(uint16_t depth) { depth_ = depth < depth_ ? depth : depth_; }
  bool full() const { return running_ >= depth_; }
  size_t running() const { return running_; }

  // The command and its memory stay where they are until it is over. Not OK: the connection is broken.
  Status start(Command& command);
  // Both move what the socket takes or has without blocking, and append commands that are over.
  Status receive(std::vector<Command*>& over);
  Status flush();
  bool wants_write() const { return first_out_ < outgoing_.size(); }
  // Commands whose connection is lost; the queue then has none.
  void abandon(std::vector<Command*>& all);
  // When the oldest command was begun; 0: there is none.
  uint64_t oldest_ns() const;

 private:
  // What is sent: a header, its digest and padding, data, and that one's digest.
  struct Outgoing {
    std::array<std::byte, 96> head;
    uint32_t head_length = 0;
    const std::byte* data = nullptr;
    uint32_t data_length = 0;
    uint32_t data_digest = 0;
    bool has_digest = false;
    size_t sent = 0;
    size_t total() const { return head_length + data_length + (has_digest ? 4 : 0); }
  };

  Status exchange_initialize(const QueueSettings& settings, uint64_t deadline_ns);
  void drop_sent();
  void enqueue(const void* pdu, uint32_t length, uint8_t flags, const std::byte* data, uint32_t data_length);
  Status on_bytes(std::vector<Command*>& over);
  Status check_header(const Header& header) const;
  Status on_pdu(const std::byte* pdu, std::vector<Command*>& over);
  Status on_response(const Response& response, std::vector<Command*>& over);
  Status on_data(const Data& data);
  Status on_data_end(std::vector<Command*>& over);
  Status on_r2t(const Data& request);
  Command* find(uint16_t id) const { return id < slots_.size() ? slots_[id] : nullptr; }
  void finish(Command& command, std::vector<Command*>& over);

  UniqueFd socket_;
  uint8_t digests_ = 0;
  uint32_t most_data_ = 4096;  // in one H2CData
  uint32_t data_unit_ = 4;     // that data in PDUs to the target is aligned to
  uint32_t in_capsule_ = 0;
  uint16_t depth_ = 1;
  size_t running_ = 0;
  std::vector<Command*> slots_;
  std::vector<uint16_t> free_;
  // From `first_out_` on. It begins at the front again whenever it is empty.
  std::vector<Outgoing> outgoing_;
  size_t first_out_ = 0;

  // Received and not looked at; and, in the middle of a C2HData, where the rest of its data goes.
  std::array<std::byte, 8192> buffer_;
  size_t begin_ = 0, end_ = 0;
  Data incoming_{};
  Command* receiving_ = nullptr;
  uint32_t data_left_ = 0;
  uint32_t data_crc_ = 0;
  bool digest_due_ = false;
};

// What a status of a completion means: the code, and its words.
Status meaning(uint16_t status);

}  // namespace mooncake::nvmeof::nvme
