// The target's side of a connection: checks each request against the regions, and serves it.
#pragma once

#include "completions.hpp"
#include "stream.hpp"

namespace mooncake_tcp {

class Incoming final : public Stream, public std::enable_shared_from_this<Incoming> {
 public:
  Incoming(Worker& worker, const Options& options, const Key& nonce, RegionTable& regions, Counters& counters)
      : Stream(worker), options_(options), nonce_(nonce), regions_(regions), counters_(counters) {}

  // On the worker's thread. The peer has the connect timeout to introduce itself.
  void begin(Descriptor socket);

  void on_deadline() override;
  void on_revoked() override;
  void on_abort(const Region& region) override;
  void on_stop() override;

 private:
  bool on_frame(const Header& header) override;
  void on_payload() override;
  bool may_read() const override;
  void on_broken(const Status& status) override;

  bool greet(const Header& header);
  void begin_write(const Header& header);
  void answer_read(const Header& header);
  void answer(Op op, const Header& request, Refusal refusal);

  const Options& options_;
  const Key& nonce_;
  RegionTable& regions_;
  Counters& counters_;
  bool greeted_ = false;
  bool turned_away_ = false;  // told that it meant another endpoint; nothing it says counts any more
  Header writing_;            // request whose payload is being received
  Refusal write_refusal_ = Refusal::kNone;
  RegionUse write_use_;
};

}  // namespace mooncake_tcp
