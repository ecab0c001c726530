// A batch of reads or writes: prepared once, posted any number of times, one run at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "notices.hpp"
#include "peer.hpp"
#include "plan.hpp"

namespace mooncake {

struct PostOptions {
  Priority priority = Priority::kNormal;
  uint64_t deadline_ns = 0;  // 0: none; then the run is ended with kTimeout
  void* stream = nullptr;    // device stream to follow
  // For the peer, told once every byte is at its place and before the transfer counts as done; when that
  // fails, so does the transfer. A new one for each run.
  std::shared_ptr<Message> message;
  std::vector<std::string> drivers;  // the only ones it may take; empty: any
  uint32_t attempts = 0;             // rounds through its rails that each slice gets; 0: as the policy says
  uint64_t held = 0;  // not 0: not done until release(), as someone checks what was moved; names the run
};

class Transfer : public std::enable_shared_from_this<Transfer> {
 public:
  enum class State : uint8_t { kPrepared, kRunning, kDone };

  Transfer(mc_opcode opcode, Plan plan, std::shared_ptr<Region> local, std::shared_ptr<RemoteRegion> remote,
           uint64_t rails);
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  const mc_opcode opcode;
  const Plan plan;
  const std::shared_ptr<Region> local;
  const std::shared_ptr<RemoteRegion> remote;
  const uint64_t rails;  // that both regions and the alignment of the blocks allow, a bit each

  State state() const { return state_.load(std::memory_order_acquire); }
  bool done() const { return state() == State::kDone; }
  // Waits until the deadline; false when it is still running then.
  bool wait_until(uint64_t deadline_ns);
  bool ok() const { return !failed_.load(std::memory_order_acquire); }
  Status result() const;
  double seconds() const;
  uint64_t bytes_done() const { return bytes_done_.load(std::memory_order_relaxed); }
  uint64_t bytes_on_rail(size_t rail) const { return bytes_on_rail_[rail].load(std::memory_order_relaxed); }
  // "write to region 'kv' of host:port"
  std::string label() const;
  // Makes the eventfd `fd` readable once the transfer is done. The descriptor is duplicated.
  Status signal_when_done(int fd);

  // ---- for the engine

  // Starts a run; false when one is running.
  bool begin(const PostOptions& options);
  void unbegin() { state_.store(State::kPrepared); }
  void note_failure(const Status& status);  // the first one is the result
  void forgive();                           // there is no failure after all
  void note_attempt(const std::string& reason);
  std::string attempts() const;
  void moved(size_t rail, uint64_t bytes) {
    bytes_done_.fetch_add(bytes, std::memory_order_relaxed);
    bytes_on_rail_[rail].fetch_add(bytes, std::memory_order_relaxed);
  }
  // Ends the run and wakes who waits.
  void complete(uint64_t now_ns);
  // As signal_when_done for a descriptor that outlives the run; false when it is done already.
  bool wake(int fd);
  void unwake(int fd);

  std::atomic<bool> finishing{false};  // nothing uses its memory any more; complete() is a moment away
  std::atomic<bool> cancelled{false};  // nothing more of it goes to a driver

  // Guarded by the engine's mutex.
  PostOptions options;
  Cursor cursor;
  uint64_t allowed = 0;  // of `rails`, those that this run may use
  bool cutting = false;  // the cursor is not at its end: counts as one of `live`
  uint64_t live = 0;
  static constexpr uint64_t kNotAsked = ~uint64_t{0};
  uint64_t failed_questions = kNotAsked;  // as LateWrites counts them, since it waits for a fence
  size_t turn_slices = 0;                 // cut since it was its turn
  uint64_t turn_bytes = 0;
  Slice* slices = nullptr;
  std::shared_ptr<Transfer> self;  // while it runs
  Transfer* previous_active = nullptr;
  Transfer* next_active = nullptr;
  bool active = false;
  bool resting = false;  // held, and every byte has moved: no driver uses its memory
  bool checked = false;  // who checks it uses its memory

 private:
  std::atomic<State> state_{State::kPrepared};
  std::atomic<bool> failed_{false};
  std::atomic<uint32_t> watchers_{0};  // threads in wait_until, and descriptors
  std::atomic<uint64_t> bytes_done_{0};
  std::vector<std::atomic<uint64_t>> bytes_on_rail_;
  uint64_t started_ns_ = 0;
  std::atomic<uint64_t> finished_ns_{0};
  mutable std::mutex mutex_;  // what follows
  std::condition_variable finished_;
  Status result_;
  std::vector<std::string> attempts_;
  std::vector<int> signals_;  // owned
  std::vector<int> wakes_;    // not owned
};

}  // namespace mooncake
