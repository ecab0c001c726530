// One instance of the driver: everything behind an endpoint handle.
#pragma once

#include <cstddef>
#include <memory>

#include "copies.hpp"
#include "devices.hpp"
#include "memory.hpp"
#include "mooncake_driver.h"
#include "options.hpp"
#include "staging.hpp"
#include "support/peers/endpoint.hpp"

namespace mooncake::nvlink {

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint : public driver::PeerEndpoint<Region> {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  Endpoint(const Options& options, const Cuda& cuda);
  ~Endpoint() { close(); }
  void close();

  Status caps(mc_caps& caps) const;
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  Status submit_on_stream(void* stream, const mc_op* ops, size_t count, size_t* accepted);
  size_t poll(mc_completion* completions, size_t capacity);
  bool arm();
  void cancel(uint64_t cookie);

 private:
  // The operations of one call, sorted into what each GPU copies.
  class Plan;

  Status start();
  Status submit_all(CUstream stream, const mc_op* ops, size_t count, size_t* accepted);
  void submit_one(CUstream stream, const mc_op& op, const Names& names, Plan& plan);
  // When the peer has answered.
  void start_late(const mc_op& op, const Region& region, const std::shared_ptr<driver::Opened>& opened,
                  const Status& refusal);
  // Which GPU copies between the two; kUnknown: none can.
  int choose(const Place& local, const RemoteMemory& remote);

  const Options options_;
  Devices devices_;
  Copies copies_;
  PieceCopies pieces_;
  StageServer stage_server_;
  StageClient stage_client_;
  bool closed_ = false;
};

}  // namespace mooncake::nvlink
