// The initiator's side of a connection: sets it up when there is work, pulls slices, matches answers.
#pragma once

#include <atomic>
#include <deque>
#include <string>
#include <vector>

#include "operation.hpp"
#include "stream.hpp"

namespace mooncake_tcp {

class Peer;

class Outgoing final : public Stream {
 public:
  Outgoing(Worker& worker, Peer& peer, size_t index) : Stream(worker), peer_(peer), index_(index) {}

  // ---- any thread
  // There is work: connect if need be, then pull.
  void kick();
  // Some operation in flight was dropped.
  void sweep_soon();
  // End the connection for good.
  void shut_soon();
  uint64_t load() const { return in_flight_bytes_.load(std::memory_order_relaxed); }

  // ---- its worker's thread
  void on_events(uint32_t events) override;
  void on_deadline() override;
  void on_stop() override;

 private:
  enum class State { kIdle, kConnecting, kGreeting, kReady, kShut };

  bool on_frame(const Header& header) override;
  void on_payload() override;
  void on_settle() override;
  void on_broken(const Status& status) override;

  void run_kick();
  void connect_next_host();
  Status connect_to(const SocketAddress& host);
  void on_connected();
  void abandon_host(const std::string& reason);
  void pull();
  void request(Slice slice);
  bool on_welcome(const Header& header);
  bool on_answer(const Header& header);
  void finish_front(const Status& status);
  void sweep();
  void drop_slice(size_t position);
  void shut();
  void fail_in_flight(const Status& status);

  // A request sent or queued. Its slice has no operation when that was dropped: the answer is then ignored.
  struct Request {
    uint64_t seq;
    Slice slice;
    mc_opcode opcode;
  };

  Peer& peer_;
  const size_t index_;
  State state_ = State::kIdle;
  std::atomic<bool> kicked_{false};
  std::atomic<bool> sweep_asked_{false};
  std::deque<Request> in_flight_;  // in the order of their answers
  std::atomic<uint64_t> in_flight_bytes_{0};
  uint64_t next_seq_ = 1;
  std::vector<Slice> pulled_;
  size_t next_host_ = 0;
  uint64_t generation_ = 0;  // counts the attempts, each of which takes the place of the ones before
  uint64_t connect_deadline_ns_ = 0;
  std::string failures_;  // of the hosts tried so far
  std::string label_;     // host:port of the current attempt
};

}  // namespace mooncake_tcp
