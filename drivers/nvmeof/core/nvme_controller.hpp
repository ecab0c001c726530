// A controller of an NVMe/TCP target, as this host sees it: connected when there is work, and again after a
// loss.
#pragma once

#include <poll.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "nvme_queue.hpp"
#include "nvme_url.hpp"
#include "os.hpp"

namespace mooncake::nvmeof::nvme {

struct Settings {
  std::string host_nqn;
  bool header_digest = false, data_digest = false;
  uint32_t io_queues = 2;
  uint32_t queue_entries = 128;
  double connect_timeout_s = 5;
  double command_timeout_s = 30;
  double keep_alive_s = 5;
  double fence_s = 10;
};

// What Identify tells.
struct Identity {
  uint64_t blocks = 0;
  uint32_t block_bytes = 0;
  uint32_t most_bytes = 0;  // of one command; 0: no limit
  uint8_t nguid[16] = {};
  uint8_t uuid[16] = {};
  std::string model, serial;
  uint16_t controller = 0;
};

// Thread-safe. Every command given to it is over in time, whatever the target does.
class Controller : public std::enable_shared_from_this<Controller> {
 public:
  // Called for commands that are over and not sync, without any lock.
  using Over = std::function<void(Command&)>;
  Controller(Url url, const Settings& settings, Over over);
  ~Controller();

  Status start();
  // Ends every command with MC_CLOSED.
  void stop();

  // False when it was stopped. Otherwise each is over some time: sent now, or when there is room, a
  // connection, and, for a write, nothing of a lost connection can land any more.
  bool give(const std::vector<Command*>& commands);
  // One command, waited for.
  Status run(Command& command);
  // How long writes of a lost connection may still land.
  uint64_t late_ns();

  // Connects and asks; for who has no region yet.
  static Status identify(const Url& url, const Settings& settings, Identity& identity);

 private:
  enum class State { kDown, kUp };

  void serve();
  Status establish();
  Status establish_queues();
  Status identify_all();
  Status set_up_admin(uint64_t deadline_ns);
  Status connect_queue(Queue& queue, uint16_t number, uint16_t depth, uint64_t deadline_ns);
  Status ask(Queue& queue, Command& command, uint64_t deadline_ns);
  Status property(uint32_t offset, uint64_t* value, uint64_t deadline_ns);
  Status set_property(uint32_t offset, uint64_t value, uint64_t deadline_ns);
  Status identify(uint32_t what, uint32_t nsid, std::byte* page, uint64_t deadline_ns);
  void stay_up();
  Status turn(std::vector<Command*>& over);
  Status check_times(std::vector<Command*>& over);
  // With the mutex held.
  Status send_waiting();
  void lose(const Status& why, std::vector<Command*>& over);
  void deliver(std::vector<Command*>& over);
  void end_waiting(const Status& why, std::vector<Command*>& over);
  Queue* roomy();
  bool held_back(const Command& command, uint64_t now) const;
  void wake();

  const Url url_;
  const Settings settings_;
  const Over over_;
  uint8_t host_id_[16] = {};
  UniqueFd wake_fd_;
  std::thread thread_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  State state_ = State::kDown;
  Queue admin_;
  std::vector<std::unique_ptr<Queue>> queues_;
  size_t next_queue_ = 0;
  Command* waiting_ = nullptr;  // the first of those; the next ones are `next`
  Command** waiting_end_ = &waiting_;
  uint64_t fence_until_ns_ = 0;
  Identity identity_;
  uint32_t in_capsule_ = 0;
  uint16_t most_entries_ = 1;
  Command alive_;
  bool asking_alive_ = false;
  uint64_t asked_alive_ns_ = 0;
  std::vector<pollfd> polled_;  // by the service thread
};

}  // namespace mooncake::nvmeof::nvme
