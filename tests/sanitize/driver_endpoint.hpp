// One endpoint of a driver with the thread that polls it, and operations that can be waited for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "drivers.hpp"
#include "failing.hpp"

namespace sanitized {

// Memory of a kind: main memory that peers on this machine can map, or a device's.
struct Pages {
  explicit Pages(size_t size, MemoryType type = MemoryType::kMain);
  ~Pages();
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  char* bytes;  // where this program sees it
  size_t size;
  mc_memory memory{};  // as a driver is told

 private:
  std::function<void()> free_;
};

struct Key {
  uint8_t bytes[MC_KEY_BYTES];
  static Key random();
};

// A region as a peer needs to know it.
struct Exported {
  uint64_t region_id = 0;
  Key key{};
  uint64_t length = 0;
  std::string blob;
};

struct Operations;

struct Slot {
  Operations* owner = nullptr;
  std::atomic<bool> completed{false};
  mc_completion result{};
};

// Operations in flight together. The poller marks them; one thread waits.
struct Operations {
  explicit Operations(size_t count);
  // False when the deadline comes first.
  bool wait(double seconds);
  void finish(Slot& slot, const mc_completion& completion);

  std::vector<Slot> slots;
  std::vector<mc_op> ops;

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  size_t left_;
};

class Endpoint {
 public:
  Endpoint(const std::string& driver, const std::string& device);
  ~Endpoint() { close(); }
  Endpoint(const Endpoint&) = delete;
  Endpoint& operator=(const Endpoint&) = delete;
  void close();

  MemoryType memory() const { return driver_.memory; }
  const mc_driver_v1& table() const { return *driver_.table; }
  mc_handle handle() const { return handle_; }
  std::string address() const;

  mc_handle add(const Pages& pages, Exported* exported);
  mc_handle connect(const std::string& address);
  mc_handle import(mc_handle connection, const Exported& exported);
  // Submits all of them, however often the driver says MC_AGAIN.
  void submit(Operations& operations);

 private:
  void poll_until_stopped();

  Driver driver_;
  mc_handle handle_ = 0;
  std::atomic<bool> stopping_{false};
  std::thread poller_;
};

void check(mc_status status, const Endpoint& endpoint, const std::string& what);

}  // namespace sanitized
