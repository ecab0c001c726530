// Memory of one rank that all ranks of a host see, and words in it by which they wait for each other.
//
// Only its owner writes a window, bytes and words alike: a rank that is late, stopped or gone cannot spoil
// what others hold. Words only grow.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace mooncake::ep {

constexpr size_t kWordBytes = 64;  // each in a cache line of its own
constexpr size_t kSleepersWord = 0;

enum class Waited { kReached, kTimedOut, kDied };

class Window {
 public:
  // Of our own, `bytes` long; pages take memory once they are written. Throws std::system_error.
  static Window create(size_t bytes);
  // A peer's, by a path to its file. Throws std::system_error.
  static Window open(const std::string& path, size_t bytes);
  Window(Window&& other) noexcept;
  Window& operator=(Window&&) = delete;
  ~Window();

  int fd() const { return fd_; }
  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

  uint64_t load(size_t word) const { return at(word).load(std::memory_order_acquire); }
  // Ours alone. What was written before is seen by whoever sees the word; wakes who sleeps on it.
  void store(size_t word, uint64_t value);
  // Until the word is `least` or more. deadline_ns: of CLOCK_MONOTONIC; pidfd: of its writer, -1 for none.
  // A word that was reached counts, whatever became of its writer.
  Waited wait(size_t word, uint64_t least, int64_t deadline_ns, int pidfd);

 private:
  Window(int fd, std::byte* data, size_t bytes) : fd_(fd), data_(data), bytes_(bytes) {}
  static Window map(int fd, size_t bytes);
  std::atomic<uint64_t>& at(size_t word) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(data_ + word * kWordBytes);
  }
  bool spin(size_t word, uint64_t least) const;
  void sleep(size_t word, uint64_t seen, int64_t ns);

  int fd_;
  std::byte* data_;
  size_t bytes_;
};

}  // namespace mooncake::ep
