// The usual get and the usual put of one value, by a client, from the question to the end without the
// interpreter: asked the express way (express.hpp), moved as one block, by an engine's compiled calls. What
// is not usual is handed over, as far as it has come, to the client's Python.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "express.hpp"
#include "mooncake_calls.h"
#include "tenure.hpp"

namespace mooncake::store {

// CLOCK_MONOTONIC; leases are judged by lease_clock_s().
uint64_t now_ns();

// How long the bytes of a value may take to move; see time_budget.py.
struct QuickLimits {
  double call_s, transfer_s;
};

// The client is a member of a master, which is at the other end of `connection`.
struct Standing {
  uint64_t connection = 0, epoch = 0, client = 0;
  double lease_ttl_s = 0, reservation_ttl_s = 0;
  double joined_s = 0;  // of the lease clock
};

// How far a call has come.
enum class Stage : uint8_t {
  kNothing,   // nothing was asked: the whole call is to be made the other way
  kOtherWay,  // as before, but the master says so
  kNotAsked,  // a question was not answered; `failure` says why
  kAnswered,  // the first question was, by `answer`, and nothing has moved
  kNotMoved,  // as before, and it was tried: `failure` says what went wrong
  kMoved,     // what is to be told or asked afterwards is left
  kMissing,   // there is no such value
  kDone,
};

struct QuickResult {
  Stage stage = Stage::kNothing;
  Standing standing;
  bool interrupted = false;            // an exception is set
  void* failure = nullptr;             // of the engine's calls
  std::string answer;                  // to Locate or Reserve
  std::string committed;               // the answer to Commit, when it is to be looked at
  uint64_t segment = 0;                // to or from which it was moved
  double asked_s = 0;                  // of the lease clock
  uint64_t asked_ns = 0, late_ns = 0;  // by how much it took longer to move than its bytes may
  uint64_t nbytes = 0;
  bool wake = false;  // somebody should tell the master that leases have ended
};

class Quick {
 public:
  // Calls of one kind, by time as in telemetry.latency.
  struct Calls {
    static constexpr size_t kBuckets = 26;
    uint64_t count = 0, failures = 0, total_ns = 0;
    std::array<uint64_t, kBuckets> buckets{};
    void add(uint64_t ns, bool failed);
  };
  enum Counted { kGet, kPut, kLocateCall, kReserveCall, kCommitCall, kCounted };
  struct Counts {
    std::array<Calls, kCounted> calls{};
    uint64_t hits = 0, misses = 0, read_bytes = 0, stored = 0, written_bytes = 0;
  };

  // `calls` outlives it. `sums`: values have checksums, and are compared with them where that is said.
  Quick(const mc_calls_v1* calls, std::string method, QuickLimits limits, bool sums)
      : calls_(calls), method_(std::move(method)), limits_(limits), sums_(sums) {}
  Quick(const Quick&) = delete;

  const mc_calls_v1* calls() const { return calls_; }

  void join(const Standing& standing);
  void leave();
  bool joined() const;
  // The segment is reached by the remote region (of keep_remote) as long as this is its descriptor.
  // `checked`: what comes from there is compared with its checksum.
  void know(uint64_t segment, std::string descriptor, void* remote, bool checked);
  void forget(uint64_t segment);
  // Forgets other segments, and ends moves from or to them that began before; they exist no more.
  void keep_only(const std::vector<uint64_t>& segments, uint64_t asked_ns);

  // The next question tells the master that these leases have ended.
  void end(const std::vector<uint64_t>& leases);
  // Those that it was not told of.
  std::vector<uint64_t> take_ended();
  // For how long the oldest of them has waited, in nanoseconds; 0: there are none.
  uint64_t ended_for() const;
  // Those under which something is being read.
  std::vector<uint64_t> leases() const;
  // From now on, the next lease that ends is worth waking somebody up (QuickResult::wake).
  void idle() { idle_ = true; }
  Counts take_counts();

  // Memory of this process. `region` is of keep_region; `bytes`: where it begins, null when it is none that
  // this can look into, and has no checksums.
  struct Memory {
    void* region;
    const uint8_t* bytes;
  };
  // Without the interpreter's lock. The digest has 16 bytes.
  QuickResult get(std::string_view digest, Memory memory, uint64_t offset, uint64_t room);
  QuickResult put(std::string_view digest, std::string_view key, bool replace, Memory memory, uint64_t offset,
                  uint64_t nbytes, uint64_t seen_epoch, uint64_t seen);

 private:
  struct Remote {
    Remote(const mc_calls_v1* calls, void* remote, bool checked)
        : calls(calls), remote(remote), checked(checked) {}
    ~Remote() { calls->drop_remote(remote); }
    Remote(const Remote&) = delete;
    const mc_calls_v1* calls;
    void* remote;
    const bool checked;
  };
  struct Reached {
    std::string descriptor;
    std::shared_ptr<Remote> remote;
  };
  struct Running {
    uint64_t segment, lease, began_ns;
    void* run;
  };
  // One piece of memory of a segment.
  struct Piece {
    uint64_t segment, offset, nbytes;
    std::string_view descriptor;
  };

  bool begin(QuickResult& result, Counted kind, std::vector<uint64_t>& ended);
  void note_other_way(Counted kind, const std::string& answer);
  bool ask(QuickResult& result, Counted kind, const std::string& request, std::string& answer);
  static bool take_piece(Reader& rest, const AnswerHead& head, uint64_t nbytes, Piece& piece);
  std::shared_ptr<Remote> reached(const Piece& piece) const;
  // `sum`: of what is written it gets the checksum, if this can look into the memory.
  bool move(QuickResult& result, Memory memory, uint64_t* sum, uint64_t offset, const Piece& piece,
            uint64_t lease, uint64_t until_ns);
  bool let_go(QuickResult& result, uint64_t lease);
  const mc_calls_v1* const calls_;
  const std::string method_;
  const QuickLimits limits_;
  const bool sums_;  // values have checksums
  std::atomic<bool> idle_{false};

  // Held while runs are cancelled, which may wait for the interpreter: never asked for with its lock held.
  std::mutex cancelling_;
  mutable std::mutex mutex_;  // what follows; who holds it waits for nothing
  bool joined_ = false;
  Standing standing_;
  uint64_t pause_until_ns_ = 0;
  std::array<bool, kCounted> never_{};  // kinds that this master answers the other way for good
  std::vector<uint64_t> ended_;
  uint64_t ended_since_ns_ = 0;
  std::unordered_map<uint64_t, Reached> reached_;
  std::vector<Running*> running_;
  Counts counts_;
};

}  // namespace mooncake::store
