// Threads for I/O that blocks: all of it where io_uring is forbidden, and what is not aligned elsewhere.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "job.hpp"
#include "os.hpp"

namespace mooncake::nvmeof {

// Thread-safe. Threads are started when there is more to do than there are idle ones.
class Pool {
 public:
  using Finished = std::function<void(Piece&, Status)>;
  Pool(uint32_t workers, bool durable, Finished finished)
      : workers_(workers), durable_(durable), finished_(std::move(finished)) {}
  ~Pool() { stop(); }

  void add(Piece& piece);
  // Waits for what was added and joins every thread.
  void stop();

 private:
  void work();
  Status move(Piece& piece, std::byte* bounce);
  Status step(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved);
  Status bounce_read(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved);
  Status bounce_write(Piece& piece, uint64_t done, std::byte* bounce, uint64_t* moved);

  const uint32_t workers_;
  const bool durable_;
  const Finished finished_;
  std::mutex mutex_;
  std::condition_variable woken_;
  Piece *first_ = nullptr, *last_ = nullptr;
  size_t queued_ = 0, idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace mooncake::nvmeof
