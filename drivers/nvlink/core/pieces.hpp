// Copies of the service thread: one piece after the other, to and from staging buffers.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <map>

#include "devices.hpp"
#include "support/peers/loop.hpp"

namespace mooncake::nvlink {

// Service thread only; close() when that has ended.
class PieceCopies {
 public:
  using Over = std::function<void(const Status&)>;

  PieceCopies(driver::Loop& loop, Devices& devices) : loop_(loop), devices_(devices) {}
  // Waits for what still runs, at most until the deadline.
  void close(uint64_t deadline_ns);

  // Main memory is both ends' `device`: then the processor copies. `over` is called when nothing is read or
  // written any more: before this returns, or where the GPU takes longer, later. What the copy touches has to
  // stay until then.
  void run(int to_device, uint64_t to, int from_device, uint64_t from, uint64_t bytes, Over over);

 private:
  struct Running {
    int device;
    CUstream stream;
    CUevent event;  // null: it could not be recorded, and the stream tells instead
    Status failure;
    Over over;
  };
  Status stream_of(int device, CUstream& stream);
  // Whether the copy is over; then its event is given back.
  bool look(Running& running);
  void look_at_slow();

  driver::Loop& loop_;
  Devices& devices_;
  std::map<int, CUstream> streams_;
  std::list<Running> slow_;
};

}  // namespace mooncake::nvlink
