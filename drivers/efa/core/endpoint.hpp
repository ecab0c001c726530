// One instance of the driver: everything behind an endpoint handle.
//
// One thread makes progress. The threads of the engine take part: who submits posts, who polls looks into the
// fabric's queue. All of them do it with one lock held, so the fabric sees one thread at a time.
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>

#include "initiator.hpp"
#include "mooncake_driver.h"
#include "shared.hpp"
#include "support/handles.hpp"
#include "target.hpp"

namespace mooncake::efa {

// The methods are the functions of mc_driver_v1, whose promises they keep. Thread-safe.
class Endpoint {
 public:
  static Status open(const mc_option* options, size_t count, std::shared_ptr<Endpoint>& endpoint);
  explicit Endpoint(const Options& options);
  ~Endpoint() { close(); }
  void close();
  // Threads do not survive fork(), nor do devices: a child must not touch the parent's endpoint.
  bool forked() const { return driver::fork_generation() != generation_; }

  Status caps(mc_caps& caps) const;
  Status stats(mc_stats& stats);
  Status export_address(void* blob, size_t* length) const;
  Status connect(const void* address, size_t length, mc_handle* connection);
  void disconnect(mc_handle connection);
  Status register_memory(const mc_memory& memory, mc_handle* registered);
  Status deregister_memory(mc_handle registered, uint64_t deadline_ns);
  Status export_key(mc_handle registered, void* blob, size_t* length) const;
  Status import_key(mc_handle connection, uint64_t region_id, const uint8_t* key, uint64_t region_length,
                    const void* blob, size_t length, mc_handle* remote);
  void release_key(mc_handle remote);
  Status grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob, size_t* length);
  Status revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns);
  Status submit(const mc_op* ops, size_t count, size_t* accepted);
  size_t poll(mc_completion* completions, size_t capacity);
  int event_fd() const { return shared_.completions.event_fd(); }
  bool arm();
  void cancel(uint64_t cookie);
  Status notify(mc_handle connection, const void* data, size_t length, uint64_t cookie);
  size_t poll_notices(mc_notice* notices, size_t capacity);
  Status late_writes(mc_handle connection, void* token, size_t* length);
  Status fence(const void* token, size_t length, uint64_t deadline_ns);

 private:
  struct Names;

  Status start();
  void run();
  // With the lock held. How many completions the fabric's queue had, asked at least so often.
  size_t progress(size_t looks = 1);
  size_t read_queue();
  void read_errors();
  void on_completion(const fi::QueueEntry& entry);
  void on_error(const fi::ErrorEntry& entry);
  uint64_t pause_ns(bool busy, uint64_t idle_ns) const;
  void sleep(uint64_t pause_ns);
  void wake();
  Status look_up(const mc_op& op, Names& names) const;

  const uint32_t generation_;
  Shared shared_;
  Initiator initiator_;
  Target target_;
  driver::HandleTable<Connection> connections_;
  driver::HandleTable<Region> regions_;
  driver::HandleTable<Remote> remotes_;
  driver::UniqueFd wake_fd_;
  std::atomic<bool> stopping_{false};
  std::atomic<uint64_t> polled_ns_{0};  // when a thread of the engine last looked
  uint64_t ticked_ns_ = 0;
  std::thread thread_;
};

}  // namespace mooncake::efa
