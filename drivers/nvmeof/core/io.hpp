// Runs operations between memory and devices: by io_uring from the thread that submits, by threads otherwise.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "gds.hpp"
#include "job.hpp"
#include "options.hpp"
#include "pool.hpp"
#include "ring.hpp"
#include "support/completions.hpp"

namespace mooncake::nvmeof {

using driver::Completion;
using driver::Completions;

// Thread-safe. Who polls takes the kernel's completions; no thread of the driver's is in between.
class Io {
 public:
  Io(const Options& options, Completions& completions);
  ~Io();

  Status start();
  // Cancels what has not begun, and waits for what has: at most for some time, see README.
  void stop();

  // What submit() of the ABI was given, checked: a job for each, from new_job().
  Job& new_job();
  void begin(std::vector<Job*>& jobs);
  // Moves what the kernel has finished to the completions; by who fetches them next, or by someone else.
  enum class Reaper { kPoller, kOther };
  void reap(Reaper reaper);
  // False: poll() must go on, nothing would wake who waits.
  bool can_sleep();
  int event_fd() const { return events_.valid() ? events_.get() : completions_.event_fd(); }
  // Ends early what the predicate names; only what has not begun can be ended.
  void cancel(const std::function<bool(const Job&)>& which, mc_status code);
  // Of GPU memory: before it is used. MC_UNSUPPORTED without the option gpudirect.
  Status prepare(Region& region, int device);
  bool moves_gpu_memory() const { return gds_ != nullptr; }
  // Before memory is given back; no operation uses it.
  void forget(Region& region);
  void forget(Device& device);
  bool uses_rings() const { return ring_ != nullptr; }
  const std::string& why_no_ring() const { return why_no_ring_; }

  // A piece is over. For devices that move bytes by themselves; from any thread.
  void finished(Piece& piece, Status status);

 private:
  struct Room {
    std::vector<Completion> completions;
    std::vector<std::shared_ptr<void>> released;  // let go of without the mutex
  };
  // What has ended. Its room is the thread's, and is used again.
  class Ended : public Room {
   public:
    Ended() : Room(std::exchange(spare_, {})) {}
    ~Ended();
    Ended(const Ended&) = delete;
    Ended& operator=(const Ended&) = delete;
    void publish(Completions& to, Reaper reaper = Reaper::kOther);

   private:
    static thread_local Room spare_;
  };

  // With the mutex held.
  void divide(Job& job);
  void add_piece(Job& job, Piece& piece, uint64_t skip, uint64_t length);
  void launch(Piece& piece, Ended& ended);
  void to_pool(Piece& piece, Ended& ended);
  Ring* ring_for(const Piece& piece) const;
  bool queue(Ring& ring, Piece& piece);
  static void fill_command(uapi::Sqe& sqe, const Piece& piece, bool durable);
  size_t in_kernel() const;
  int buffer_slot(Region& region, const Piece& piece);
  int file_slot(Device& device);
  void take_all(Ring& ring, Ended& ended);
  void on_result(Piece& piece, int result, Ended& ended);
  void end_piece(Piece& piece, Status status, Ended& ended);
  void end_job(Job& job, Ended& ended);
  void unlink(Job& job);

  const Options options_;
  Completions& completions_;
  Pool pool_;
  std::unique_ptr<Gds> gds_;
  UniqueFd events_;
  std::string why_no_ring_;

  std::mutex mutex_;
  std::unique_ptr<Ring> ring_, polled_ring_, command_ring_;
  std::unordered_map<Ring*, size_t> in_rings_;  // what the kernel has of each
  bool polling_ = true;                         // until a device does not do it
  std::unordered_map<uint64_t, int> files_;     // by the serial of the device
  std::deque<Job> slab_;
  Job* free_ = nullptr;
  Job* active_ = nullptr;
  bool stopping_ = false;
  Piece nobody_;  // what the results of cancel requests name
};

}  // namespace mooncake::nvmeof
