// Answers the usual requests of clients without the interpreter: what is on the express way (express.hpp).
// All it touches is the master's; one mutex guards that against the master's Python.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "express.hpp"
#include "grants.hpp"
#include "object_map.hpp"
#include "tenure.hpp"

namespace mooncake::store {

// Held by whoever touches a master's state. For who waits for something to happen there, it is a condition
// variable, too.
class DeskLock {
 public:
  void acquire();
  bool try_acquire(uint64_t for_ns);
  void release();
  bool is_mine() const { return owner_ == std::this_thread::get_id(); }
  // While held, both. True when it was notified.
  bool wait(double timeout_s);
  void notify();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<std::thread::id> owner_{};
  uint64_t notified_ = 0;
};

class Desk {
 public:
  struct Client {
    uint64_t connection;
    uint32_t number;
    uint64_t node;
    uint16_t tenant;
    bool express;  // else it has to ask the other way
    // Not empty: it sees objects of its tenant only, and this goes before keys in what digests are made of.
    std::string own_prefix;
    double heard_s = 0;
  };
  struct Reads {
    uint64_t hits = 0, misses = 0;
  };
  // Calls of one kind since they were last asked for: number, seconds, and by time as in telemetry.latency.
  struct Calls {
    static constexpr size_t kBuckets = 26;
    uint64_t count = 0;
    double total_s = 0;
    std::array<uint64_t, kBuckets> buckets{};
  };
  using Sample = std::pair<Digest, uint32_t>;  // of what is read, and for how many reads it stands
  using Touch = std::pair<Digest, uint64_t>;   // what was read, and the segment of its first byte

  Desk(ObjectMap& map, GrantTable& leases, GrantTable& reservations, uint64_t epoch,
       uint64_t most_record_bytes)
      : map_(map),
        leases_(leases),
        reservations_(reservations),
        epoch_(epoch),
        most_record_bytes_(most_record_bytes) {}
  Desk(const Desk&) = delete;

  DeskLock& lock() { return lock_; }

  // All below but answer(): with the lock held.
  void close() { open_ = false; }
  bool is_open() const { return open_; }
  // From now on nothing is answered but in this leadership.
  void lead(std::shared_ptr<const Tenure> tenure) { tenure_ = std::move(tenure); }
  // There are tiers, of which nothing is known here: only what lies in memory is read, and told of.
  void note_touches() { tiered_ = true; }
  std::vector<Touch> take_touches() { return std::exchange(touches_, {}); }
  void admit(uint64_t client, const Client& known) { clients_[client] = known; }
  void drop(uint64_t client) { clients_.erase(client); }
  double heard_s(uint64_t client) const;
  void describe(uint64_t segment, std::string descriptor) { descriptors_[segment] = std::move(descriptor); }
  void forget(uint64_t segment) { descriptors_.erase(segment); }
  void count(uint16_t tenant, uint64_t hits, uint64_t misses);
  const std::vector<Reads>& reads() const { return reads_; }
  std::vector<Sample> take_samples() { return std::exchange(samples_, {}); }
  std::array<Calls, kExpressKinds> take_calls() { return std::exchange(calls_, {}); }
  // As ObjectMap::take_rings, of what was answered here; the lock is notified when there are any.
  std::vector<uint32_t> take_rings() { return std::exchange(rings_, {}); }

  std::string answer(uint64_t connection, std::string_view body);

 private:
  struct Asked {
    AskHead head;
    Reader rest;
    Client& client;
    double now_s;
  };

  // What came of a request: it was answered, or nothing was done.
  enum class Done : uint8_t { kYes, kNotNow, kNotThis, kNever };

  Done answer(Asked& asked, std::string& reply);
  Done locate(Asked& asked, std::string& reply);
  Done release(Asked& asked, std::string& reply);
  Done exist(Asked& asked, std::string& reply);
  Done reserve(Asked& asked, std::string& reply);
  Done commit(Asked& asked, std::string& reply);
  bool in_office() const { return !tenure_ || tenure_->held(); }
  bool all_in_memory(const std::vector<Digest>& digests) const;
  std::vector<Digest> visible(const Client& client, std::vector<Digest> digests) const;
  void touch(const std::vector<Digest>& digests, const std::vector<Rows>& replicas);
  void end_leases(const std::vector<uint64_t>& ended, uint64_t client);
  void ring();
  void sample(const std::vector<Digest>& digests);
  uint16_t add_segments(std::string& reply, const std::vector<Rows>& lists);

  DeskLock lock_;
  ObjectMap& map_;
  GrantTable &leases_, &reservations_;
  const uint64_t epoch_, most_record_bytes_;
  bool open_ = true, tiered_ = false;
  std::shared_ptr<const Tenure> tenure_;
  std::vector<Touch> touches_;
  std::unordered_map<uint64_t, Client> clients_;
  std::unordered_map<uint64_t, std::string> descriptors_;  // by segment
  std::vector<Reads> reads_;                               // by tenant
  std::vector<Sample> samples_;
  uint64_t turn_ = 0;
  std::vector<uint32_t> rings_;
  std::array<Calls, kExpressKinds> calls_{};
};

// The place of the desk on one engine; engines keep handlers for good, masters come and go.
class DeskPort {
 public:
  void attach(Desk* desk) {
    std::lock_guard lock(mutex_);
    desk_ = desk;
  }
  // The desk answers nobody any more when this returns.
  void detach() { attach(nullptr); }
  std::string answer(uint64_t connection, std::string_view body) {
    std::lock_guard lock(mutex_);
    return desk_ == nullptr ? std::string() : desk_->answer(connection, body);
  }

 private:
  std::mutex mutex_;
  Desk* desk_ = nullptr;
};

}  // namespace mooncake::store
