// Memory of one rank that all ranks of a host see, and words in it by which they wait for each other.
//
// Only its owner writes the bytes of a window: a rank that is late, stopped or gone cannot spoil what others
// hold. Words are numbers that only grow, with one bit more: whoever gives the owner up *ends* its words, by
// compare-and-swap. A number was reached before its word ended or never will be, so all ranks see the same.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace mooncake::ep {

constexpr size_t kWordBytes = 64;  // each in a cache line of its own
constexpr size_t kSleepersWord = 0;
constexpr uint64_t kEnded = 1;

enum class Waited { kReached, kTimedOut, kDied, kEnded };

bool has_died(int pidfd);

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

  uint64_t load(size_t word) const { return at(word).load(std::memory_order_acquire) >> 1; }
  bool ended(size_t word) const { return at(word).load(std::memory_order_acquire) & kEnded; }
  // Ours alone. What was written before is seen by whoever sees the word; wakes who sleeps on it. The word
  // lives, whether it had ended or not.
  void store(size_t word, uint64_t value);
  // The same, but false and nothing changes when the word has ended.
  bool post(size_t word, uint64_t value);
  // A peer's word that is less than `least` ends with the value it has. False when it is `least` or more.
  bool end(size_t word, uint64_t least);
  // Until the word is `least` or more. deadline_ns: of CLOCK_MONOTONIC; pidfd: of its writer, -1 for none.
  // A word that was reached counts, whatever became of it or its writer.
  Waited wait(size_t word, uint64_t least, int64_t deadline_ns, int pidfd);

 private:
  Window(int fd, std::byte* data, size_t bytes) : fd_(fd), data_(data), bytes_(bytes) {}
  static Window map(int fd, size_t bytes);
  std::atomic<uint64_t>& at(size_t word) const {
    return *reinterpret_cast<std::atomic<uint64_t>*>(data_ + word * kWordBytes);
  }
  void wake(size_t word);
  bool spin(size_t word, uint64_t least) const;
  void sleep(size_t word, uint64_t seen, int64_t ns);

  int fd_;
  std::byte* data_;
  size_t bytes_;
};

}  // namespace mooncake::ep
