// Whether the owner of mapped memory still lives, told by one load instead of a system call.
#pragma once

#include <linux/futex.h>

#include <atomic>
#include <cstdint>
#include <memory>

#include "os.hpp"

namespace mooncake::shm {

// One word in a small memfd that the endpoint's owner may write and its peers may only read. It works like a
// robust mutex: the owner's service thread holds it, and when that thread ends, however its process died, the
// kernel marks the word on the thread's way out.
class LifeSign {
 public:
  // Owner: makes the word. Until hold() it says that nothing is known.
  static Status create(std::shared_ptr<LifeSign>& sign, std::shared_ptr<const UniqueFd>& fd);
  // Owner: from now on the calling thread's life is shown. Nothing is known where the kernel has no robust
  // futexes. The object must outlive the thread.
  void hold();
  // Owner: from now on the word says that the owner has gone.
  void resign();

  // Peer: maps a word that it was passed.
  static Status open(int fd, std::shared_ptr<LifeSign>& sign);

  enum class Answer { kAlive, kGone, kUnknown };
  Answer ask() const {
    uint32_t word = word_->load(std::memory_order_acquire);
    if ((word & FUTEX_OWNER_DIED) != 0) return Answer::kGone;
    return word != 0 ? Answer::kAlive : Answer::kUnknown;
  }

  ~LifeSign();
  LifeSign(const LifeSign&) = delete;
  LifeSign& operator=(const LifeSign&) = delete;

 private:
  explicit LifeSign(std::atomic<uint32_t>* word) : word_(word) {}
  static Status map(int fd, int protection, std::shared_ptr<LifeSign>& sign);

  std::atomic<uint32_t>* word_;
  robust_list_head head_{};  // the kernel reads both when the thread ends
  robust_list entry_{};
};

static_assert(std::atomic<uint32_t>::is_always_lock_free, "the word is shared between processes");

}  // namespace mooncake::shm
