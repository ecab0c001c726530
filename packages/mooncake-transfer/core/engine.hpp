// The engine: drivers, regions, peers, and what keeps transfers going.
//
// A transfer waits in the queue of its peer and is cut into slices as the peer's rails have room. Whoever
// polls (a waiting thread, or the progress thread when nobody waits) takes completions, frees room and cuts
// further.
#pragma once

#include <unistd.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "forks.hpp"
#include "notice.hpp"
#include "numa.hpp"
#include "slices.hpp"
#include "spin.hpp"
#include "transfer.hpp"

namespace mooncake {

class Channel;

class Engine : public std::enable_shared_from_this<Engine> {
 public:
  Engine();
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // ---- before start()

  // Endpoints in order of preference, those of one driver one after another.
  Status add_endpoint(const mc_driver_v1* table, const std::string& name, const std::string& device,
                      int numa_node, const Endpoint::Options& options);
  void set_policy(const RailPolicy& policy) { policy_ = policy; }
  void set_numa_distances(std::vector<std::vector<uint32_t>> distances) {
    numa_ = NumaDistances(std::move(distances));
  }
  // Where notifications go; it must outlive the engine.
  void set_channel(Channel* channel) { channel_ = channel; }
  Channel* channel() const { return channel_; }
  Status start();
  // Ends every transfer with kClosed. Safe to call twice, and while other threads wait.
  void close();

  const Origin& origin() const { return origin_; }
  const Endpoints& endpoints() const { return *endpoints_; }
  Status export_addresses(std::vector<DriverBlob>* addresses);

  // ---- regions

  Status register_region(mc_memory memory, const std::string& name, std::shared_ptr<Region>* region);
  Status export_keys(const Region& region, std::vector<DriverBlob>* keys);
  // A key with lesser rights, at every driver that has such; kUnsupported when none has.
  Status grant(const Region& region, const uint8_t* key, uint32_t access, std::vector<DriverBlob>* keys);
  Status revoke(const Region& region, const uint8_t* key, uint64_t deadline_ns);
  // Peers are refused at once; own transfers are waited for, or make it fail with nothing changed.
  Status close_region(Region& region, uint64_t deadline_ns, bool refuse_when_used);

  // ---- peers

  // `epoch`: which incarnation it is.
  Status add_peer(const std::string& label, uint64_t channel_connection, uint64_t epoch,
                  const std::vector<DriverBlob>& addresses, std::shared_ptr<Peer>* peer);
  Status import_region(std::shared_ptr<Peer> peer, const std::string& name, uint64_t region_id,
                       const uint8_t* key, uint64_t length, const std::vector<DriverBlob>& keys,
                       std::shared_ptr<RemoteRegion>* remote);
  std::vector<std::shared_ptr<Peer>> peers();

  // ---- late writes, see there

  // Null for an incarnation that this engine has never reached.
  std::shared_ptr<LateWrites> late_writes_of(uint64_t epoch);
  // For a peer: ends what the token names at the endpoint of that driver and device.
  Status fence(const std::string& driver, const std::string& device, const std::string& token,
               uint64_t deadline_ns);

  // ---- transfers

  // Which rails can take the plan; kNoRoute with every driver's reason when none can.
  Status prepare(mc_opcode opcode, std::shared_ptr<Region> local, std::shared_ptr<RemoteRegion> remote,
                 Plan plan, std::shared_ptr<Transfer>* transfer);
  Status post(const std::shared_ptr<Transfer>& transfer, const PostOptions& options);
  // Ends it early; `why` becomes its result unless everything has moved meanwhile.
  void cancel(Transfer& transfer, const Status& why);
  // Polls, then sleeps; true when the transfer is done, false at the deadline.
  bool wait(Transfer& transfer, uint64_t deadline_ns);
  // Takes what completions there are.
  void progress();
  // Someone who does not wait in wait() wants to know when transfers are done.
  void attend();
  // What stands in the way of a transfer that is not done, for a message.
  std::string explain(Transfer& transfer);
  // "write to region 'kv' of host:port did not finish within 2 s: ..."
  std::string overdue(Transfer& transfer, double timeout_s);

  // ---- runs with PostOptions::held, the ticket; they say no, or do nothing, when that run has ended

  // Lets who checks use the local memory until end_check(): so long the run cannot end, only be cancelled.
  bool begin_check(Transfer& transfer, uint64_t ticket);
  void end_check(Transfer& transfer, uint64_t ticket);
  bool wants_check(Transfer& transfer, uint64_t ticket);
  // Ends the run; the status is its result.
  void release(Transfer& transfer, uint64_t ticket, const Status& status);

  // Whether transfers of this engine may use that driver from now on; what is under way ends as it is. Peers
  // reach this engine over it all the same.
  Status enable_driver(const std::string& name, bool enabled);

  Notices& notices() { return *notices_; }

 private:
  static constexpr size_t kBatch = 64;
  static constexpr uint64_t kFenceCheckNs = 2'000'000;
  static constexpr uint64_t kSpinBytes = 1u << 20;  // waits for larger transfers say nothing about spinning
  // Operations for one endpoint, on their way from the queues to the driver.
  struct Batch {
    size_t endpoint = 0;
    void* stream = nullptr;
    uint64_t cancels = 0;                          // as of before its slices were placed
    std::vector<std::shared_ptr<Transfer>> stale;  // let go of without the mutex: with them goes the peer
    uint64_t now_ns = mooncake::now_ns();          // read once: a clock takes as long as a small slice
    std::vector<std::pair<size_t, std::shared_ptr<Message>>> carried;  // slices that a message waits for
    size_t count = 0;
    mc_op ops[kBatch];
    Slice* slices[kBatch];
  };
  enum class Cut { kExhausted, kTurnOver, kFull, kOtherEndpoint, kFailed, kFenced };
  enum class Pick { kRail, kFull, kNone, kFenced, kNoFence };

  // dispatch.cpp; those marked (m) are called with the mutex held
  void pump();
  void collect(Batch& batch, std::vector<std::shared_ptr<Transfer>>& ended);                // (m)
  Cut cut_into(Transfer& transfer, Batch& batch);                                           // (m)
  Cut retry_into(Peer& peer, Batch& batch, std::vector<std::shared_ptr<Transfer>>& ended);  // (m)
  bool place(Slice& slice, size_t rail, Batch& batch);                                      // (m)
  Status begin(Transfer& transfer, const PostOptions& options);
  void link(const std::shared_ptr<Transfer>& transfer);  // (m)
  void enqueue(std::shared_ptr<Transfer> transfer);      // (m)
  void make_ready(Peer& peer);                           // (m)
  void unready(Peer& peer);                              // (m)
  void block(Peer& peer);                                // (m)
  void drop_rest(Transfer& transfer);                    // (m)
  Slice* new_slice(Transfer& transfer);                  // (m)
  void free_slice(Slice& slice);                         // (m)
  bool take_ended(Transfer& transfer);                   // (m) true once, when nothing of it is left to do
  bool unlink(Transfer& transfer);                       // (m) false when close() has ended it
  std::string one_that_uses(const Region& region);
  void submit(Batch& batch);
  void settle(Slice* const* slices, size_t count, uint64_t now_ns);
  void end(Transfer& transfer, uint64_t now_ns);
  void finish(Transfer& transfer, uint64_t now_ns);
  void on_completions(size_t endpoint, const mc_completion* completions, size_t count);
  // The driver broke its contract: counted, and told once.
  void accuse(size_t endpoint, const std::string& of);
  // True when the slice will be tried again; otherwise it is to be settled.
  bool on_failure(Slice& slice, Status status);
  bool reroute(Slice& slice, Code code);  // (m)

  // choosing.cpp
  Status choose(const Transfer& transfer, const PostOptions& options, uint64_t* allowed) const;
  uint64_t rails_where(const Transfer& transfer, const std::function<bool(const Endpoint&)>& suits) const;
  std::vector<std::string> drivers_of(const Transfer& transfer, uint64_t rails) const;
  uint64_t usable_rails(const Transfer& transfer, uint64_t allowed) const;
  void give_up_without_route(Transfer& transfer);  // (m)
  void tell_unused(RemoteRegion& remote, size_t rail, const Status& status);
  Pick pick(Transfer& transfer, uint64_t tried, uint64_t bytes, uint64_t now, size_t* rail,
            bool* probe);  // (m)
  Pick best_of_tier(const Transfer& transfer, uint64_t rails, uint64_t bytes, size_t* rail,
                    bool* probe);  // (m)
  uint64_t slice_limit(const Transfer& transfer, const Rail& rail, bool probe, uint64_t* hard) const;

  // checking.cpp
  bool rest(Transfer& transfer);
  static bool is_resting(const Transfer& transfer, uint64_t ticket);  // (m)

  // cancelling.cpp
  void cancel_slices(Transfer& transfer);  // (m)

  // fencing.cpp
  std::shared_ptr<LateWrites> late_writes_of(const std::string& address, uint64_t epoch);
  Pick behind_fence(Transfer& transfer, uint64_t now_ns, uint64_t* rails);        // (m)
  void give_up_behind_fence(Transfer& transfer);                                  // (m)
  void hold_behind_fence(std::shared_ptr<Transfer> transfer, uint64_t since_ns);  // (m)
  void look_again_at(uint64_t ns);                                                // (m)
  void bring_back_fenced(Peer& peer, Batch& batch);                               // (m)

  // notices_out.cpp
  void ask_for_notices(const Peer& peer);
  void reserve_notice(Transfer& transfer);        // (m)
  void follow(const Slice& slice, Batch& batch);  // (m)
  bool drop_notice(Transfer& transfer);           // (m)
  void break_notice(Transfer& transfer);
  void note_accepted(Batch& batch, size_t begin, size_t end);
  void send_notices(Batch& batch);
  void send_notice(Message& message);
  void notice_ended(const Slice& slice, const mc_completion& completion);
  Status tell(Transfer& transfer);

  // notices_in.cpp
  struct Fetched {
    size_t endpoint;
    uint64_t sequence;
    std::string bytes;
  };
  bool listening() const;
  size_t fetch_notices(bool wait_for_turn);
  void deliver_fetched();
  void make_room_for_notices();

  // progress.cpp
  void run();
  size_t poll(bool wait_for_turn);
  bool arm_all();
  bool outstanding() const;
  uint64_t run_timers();
  void lead(Transfer& transfer, uint64_t deadline_ns);
  void sleep_until(int epoll_fd, uint64_t until_ns);
  void kick();

  std::shared_ptr<Endpoints> endpoints_ = std::make_shared<Endpoints>();
  Channel* channel_ = nullptr;
  RailPolicy policy_;
  NumaDistances numa_;
  Notices* notices_ =
      new Notices;  // not deleted in a forked child, where a condition may have lost its waiters

  std::mutex mutex_;  // what follows
  Transfer* active_ = nullptr;
  std::set<std::pair<uint64_t, Peer*>> ready_;  // peers with work and room, the most urgent first
  std::vector<std::shared_ptr<Peer>> stalled_;  // a driver's own queue was full
  SliceTable slices_;
  std::set<std::pair<uint64_t, Transfer*>> deadlines_;
  std::vector<std::weak_ptr<Peer>> peers_;
  std::vector<std::shared_ptr<LateWrites>> late_;     // one for each incarnation of a peer
  std::vector<std::shared_ptr<Transfer>> graveyard_;  // ended by close() while threads may still look at them

  std::atomic<uint32_t> disabled_{0};  // endpoints of drivers that transfers must not use
  std::atomic<size_t> queued_{0};      // peers in `ready_`
  std::atomic<uint64_t> cancels_{0};
  std::atomic<uint64_t> next_retry_ns_{~uint64_t{0}};
  std::atomic<bool> closing_{false};
  std::once_flag closed_;

  bool has_notices_ = false;  // some endpoint; constant once it has started
  std::mutex fetching_;
  std::vector<Fetched> fetched_;  // in the last round

  // Who polls: at most one waiting thread leads; the progress thread does when none does.
  std::atomic<bool> led_{false};
  std::atomic<uint32_t> followers_{0};
  std::atomic<bool> attended_{false};  // completions must wake the progress thread
  std::atomic<bool> asleep_{false};    // the progress thread watches nothing but `wake_fd_`
  SpinBudget spin_;
  int wake_fd_ = -1;
  int leader_fd_ = -1;
  int epoll_fd_ = -1;         // wake_fd_ and the endpoints
  int leader_epoll_fd_ = -1;  // leader_fd_ and the endpoints
  std::thread progress_;
  const pid_t owner_ = getpid();
  const Origin origin_;
};

}  // namespace mooncake
