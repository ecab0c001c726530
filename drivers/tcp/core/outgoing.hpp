// The initiator's side of a connection: sets it up when there is work, pulls slices, matches answers.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "operation.hpp"
#include "stream.hpp"

namespace mooncake_tcp {

class Peer;

// The first connection of a peer is hosted: once it is up, the threads that submit and poll move its bytes
// themselves, which saves waking a worker. Hence the lock; of the others only their worker ever takes it.
class Outgoing final : public Stream {
 public:
  Outgoing(Worker& worker, Peer& peer, size_t index) : Stream(worker), peer_(peer), index_(index) {}

  // ---- any thread
  // There is work: connect if need be, then pull.
  void kick();
  // The same, on this thread if possible.
  void kick_here();
  bool is_hosted() const { return hosted_.load(std::memory_order_relaxed); }
  // Some operation in flight was dropped.
  void sweep_soon();
  // End the connection for good.
  void shut_soon();
  uint64_t load() const { return in_flight_bytes_.load(std::memory_order_relaxed); }

  // ---- its worker's thread; on_events() also that of the host
  void on_events(uint32_t events) override;
  void on_deadline() override;
  void on_stop() override;

 private:
  enum class State { kIdle, kConnecting, kGreeting, kReady, kShut };

  bool on_frame(const Header& header) override;
  void on_payload() override;
  void on_settle() override;
  void on_broken(const Status& status) override;

  // Runs `body` under the lock, then does what other threads asked for meanwhile.
  template <typename Body>
  void enter(Body&& body);
  void settle_if_asked();

  void run_kick();
  void connect_next_host();
  Status connect_to(const SocketAddress& host);
  void on_connected();
  void abandon_host(const std::string& reason);
  void pull();
  void request(Slice slice);
  bool on_welcome(const Header& header);
  bool on_answer(const Header& header);
  bool finish_writes(uint64_t seq);
  void finish_front(const Status& status);
  void tell_finished();
  void sweep();
  void drop_slice(size_t position);
  size_t find_queued(uint64_t seq) const;
  void shut();
  void fail_in_flight(const Status& status);

  // A request sent or queued. Its slice has no operation when that was dropped: the answer is then ignored.
  struct Request {
    uint64_t seq = 0;
    Slice slice;
    mc_opcode opcode = MC_READ;
  };

  Peer& peer_;
  const size_t index_;
  std::mutex lock_;  // everything but the atomics
  State state_ = State::kIdle;
  std::atomic<bool> hosted_{false};
  std::atomic<bool> asked_{false};  // to settle, by one that found the lock taken
  std::atomic<bool> kicked_{false};
  std::atomic<bool> sweep_asked_{false};
  Ring<Request> in_flight_;  // in the order of their answers
  std::atomic<uint64_t> in_flight_bytes_{0};
  uint64_t next_seq_ = 1;
  std::vector<Slice> pulled_;
  std::vector<Slice> finished_;  // and not yet told to the peer
  size_t next_host_ = 0;
  uint64_t generation_ = 0;  // counts the attempts, each of which takes the place of the ones before
  uint64_t connect_deadline_ns_ = 0;
  std::string failures_;  // of the hosts tried so far
  std::string label_;     // host:port of the current attempt
};

}  // namespace mooncake_tcp
