// The framing of one connection, either side: a queue of frames out, headers in, payloads straight to where
// they belong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "address.hpp"
#include "options.hpp"
#include "ring.hpp"
#include "transport.hpp"
#include "worker.hpp"

namespace mooncake_tcp {

class Stream : public Watched {
 public:
  void on_events(uint32_t events) override;

 protected:
  struct Frame {
    Header header;
    const std::byte* payload = nullptr;
    uint64_t payload_length = 0;
    uint64_t sent = 0;    // of header and payload together
    bool filler = false;  // what is left of the payload goes out as zeros, the memory is not ours any more
    RegionUse use;        // of the region that `payload` lies in, when the frame has to hold it
  };

  explicit Stream(Worker& worker) : worker_(worker) {}

  // Takes a socket over, watched by the worker. False (errno) when it cannot be watched.
  bool adopt(Descriptor socket, uint32_t events, std::shared_ptr<void> owner,
             const mooncake::tls::Context* tls, Transport::Side side);
  // From now on `host` tells of bytes and of room, on whatever thread asks it; the worker of the end only.
  // False (errno): nothing has changed.
  bool move_to(Poller& host, std::shared_ptr<void> owner);
  bool encrypted() const { return transport_.encrypted(); }
  bool is_open() const { return transport_.valid(); }
  int socket() const { return transport_.fd(); }
  void set_deadline(uint64_t deadline_ns) { worker_.set_deadline(token_, deadline_ns); }
  void close_socket();
  // Closes and tells on_broken(). The caller returns at once.
  void fail(Status status);

  // Sends what the socket takes; may fail() the stream.
  void flush();
  // Flushes, then waits for what is needed next. The last thing to do on each way into the stream.
  void settle();
  // The next `length` bytes belong at `to`; nullptr: nowhere.
  void expect_payload(std::byte* to, uint64_t length);
  // What is left of the payload being received belongs nowhere.
  void divert_payload() { sink_.to = nullptr; }
  bool receiving_payload() const { return sink_.active; }

  // A well-formed header arrived. False: it makes no sense here, and the connection ends.
  virtual bool on_frame(const Header& header) = 0;
  virtual void on_payload() = 0;
  // Everything that was there to read has been handled.
  virtual void on_settle() {}
  virtual bool may_read() const { return true; }
  virtual void on_broken(const Status& status) = 0;

  Worker& worker_;
  Ring<Frame> out_;
  uint64_t sent_seq_ = 0;  // of the last request that went out whole

 private:
  struct Sink {
    bool active = false;
    std::byte* to = nullptr;
    uint64_t remaining = 0;
  };

  void receive();
  bool parse();
  bool take_payload_from_ahead();
  bool take_header();
  void consume(size_t received);
  void note_sent(uint64_t bytes);

  Transport transport_;
  uint64_t token_ = 0;      // with the worker
  Poller* host_ = nullptr;  // see move_to()
  uint64_t host_token_ = 0;
  uint32_t watched_events_ = 0;
  bool stalled_ = false;  // stopped in the middle of `ahead_` because may_read() said no
  bool bulk_ = false;  // the last frame was large: read ahead no further than one header, so that payload is
                       // never copied
  Sink sink_;
  size_t ahead_begin_ = 0;
  size_t ahead_end_ = 0;
  std::byte ahead_[64 << 10];
};

// Options of a connected or connecting socket. `same_host` chooses a small send buffer.
void tune_socket(int socket, const Options& options, bool same_host);

}  // namespace mooncake_tcp
