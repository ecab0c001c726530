// The target's side of a connection: checks each request against the regions, and serves it.
#pragma once

#include <functional>

#include "completions.hpp"
#include "sessions.hpp"
#include "stream.hpp"

namespace mooncake_tcp {

class Incoming final : public Stream, public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(Worker& worker, const Options& options, const Key& nonce, const RegionTable& regions,
           Counters& counters, Sessions& sessions)
      : Stream(worker),
        options_(options),
        nonce_(nonce),
        admission_(regions),
        counters_(counters),
        sessions_(sessions) {
    counters_.strangers.fetch_add(1, std::memory_order_relaxed);
  }

  ~Incoming() override { introduced(); }

  // On the worker's thread. The peer has the connect timeout to introduce itself.
  void begin(Descriptor socket);

  // From any thread: close, then call `then`, on the worker's thread.
  void end_soon(std::function<void()> then);

  void on_deadline() override;
  void on_revoked() override;
  void on_abort(const Region& region) override;
  void on_stop() override;

 private:
  bool on_frame(const Header& header) override;
  void on_payload() override;
  void on_settle() override { acknowledge(); }
  bool may_read() const override;
  void on_broken(const Status& status) override;

  bool greet(const Header& header);
  void welcome(mc_status status);
  void predecessor_closed();
  // Does not count as a stranger any more.
  void introduced();
  // Nothing of the connection is applied any more.
  void ended();
  void begin_write(const Header& header);
  void answer_read(const Header& header);
  void answer(Op op, const Header& request, Refusal refusal);
  // Tells of the writes applied since the last time, all in one frame.
  void acknowledge();

  const Options& options_;
  const Key& nonce_;
  Admission admission_;
  Counters& counters_;
  Sessions& sessions_;
  Header hello_;
  size_t predecessors_ = 0;  // of the same lane, which close before this one is welcome
  bool stranger_ = true;
  bool said_hello_ = false;
  bool greeted_ = false;  // and was told that it is welcome
  Header writing_;        // request whose payload is being received
  Refusal write_refusal_ = Refusal::kNone;
  RegionUse write_use_;
  uint64_t applied_seq_ = 0;    // of the last write that was applied and not yet acknowledged; 0: none
  uint64_t applied_bytes_ = 0;  // of those
};

}  // namespace mooncake_tcp
