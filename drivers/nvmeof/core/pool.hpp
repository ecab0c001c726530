// Threads for I/O that blocks: all of it where io_uring is forbidden, and what is not aligned elsewhere.
#pragma once

#include <cstdint>
#include <functional>

#include "job.hpp"
#include "os.hpp"
#include "support/workers.hpp"

namespace mooncake::nvmeof {

// Thread-safe.
class Pool {
 public:
  using Finished = std::function<void(Piece&, Status)>;
  Pool(uint32_t workers, bool durable, Finished finished)
      : durable_(durable),
        finished_(std::move(finished)),
        workers_("mc-nvmeof", workers, [this](auto&) { work(); }) {}

  // As Workers::add(): the piece of an error is the caller's to end.
  Status add(Piece& piece) { return workers_.add(piece); }
  // Waits for what was added and joins every thread.
  void stop() { workers_.stop(); }

 private:
  void work();
  Status move(Piece& piece, std::byte* bounce);
  Status step(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved);
  Status bounce_read(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved);
  Status bounce_write(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved);

  const bool durable_;
  const Finished finished_;
  driver::Workers<Piece> workers_;
};

}  // namespace mooncake::nvmeof
