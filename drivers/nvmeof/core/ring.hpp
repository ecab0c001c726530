// One io_uring, by system calls.
#pragma once

#include <sys/uio.h>

#include <array>
#include <atomic>
#include <bitset>
#include <cstdint>
#include <memory>

#include "os.hpp"
#include "uapi.hpp"

namespace mooncake::nvmeof {

// Not thread-safe.
class Ring {
 public:
  static constexpr uint32_t kFiles = 1024;
  static constexpr uint32_t kBuffers = 4096;

  // `flags`: what of SETUP_IOPOLL, _SQE128, _CQE32 it shall be. MC_UNSUPPORTED with the reason where the
  // kernel, its settings or a seccomp filter do not allow it.
  static Status open(uint32_t entries, uint32_t flags, std::unique_ptr<Ring>& ring);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  int fd() const { return fd_.get(); }
  bool supports(uint8_t opcode) const { return supported_.test(opcode); }

  // A cleared entry to fill; null when the queue is full: submit() first.
  uapi::Sqe* next();
  // Gives the kernel what next() handed out, in one system call. Not all may be taken: see unsubmitted().
  void submit();
  uint32_t unsubmitted() const { return tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE); }
  // Lets the kernel look for completions: of polled I/O, and of those for which the queue was full.
  void look() { (void)enter(0, uapi::kEnterGetEvents); }
  bool overflown() const { return (__atomic_load_n(sq_flags_, __ATOMIC_RELAXED) & uapi::kSqCqOverflow) != 0; }

  // Whether a completion waits.
  bool ready() const { return cq_tail() != __atomic_load_n(cq_head_, __ATOMIC_RELAXED); }
  // The next completion, if there is one.
  bool take(uapi::Cqe& cqe);

  // -1 when the kernel does not register it: there is no place left, or not enough lockable memory.
  int add_file(int fd);
  void remove_file(int slot);
  int add_buffer(const void* address, size_t length);
  void remove_buffer(int slot);

 private:
  template <size_t Count>
  struct Slots {
    std::array<uint64_t, Count / 64> used{};
    size_t hint = 0;
    int take();
    void give_back(int slot);
  };

  Ring() = default;
  Status map(const uapi::Params& params);
  void probe();
  int enter(uint32_t to_submit, uint32_t flags);
  bool make_table(uint32_t what, uint32_t count);
  bool update(uint32_t what, uint32_t slot, const void* data);
  uint32_t cq_tail() const { return __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE); }

  UniqueFd fd_;
  bool has_files_ = false, has_buffers_ = false;
  std::bitset<256> supported_;
  void* rings_ = nullptr;
  size_t rings_bytes_ = 0;
  void* entries_ = nullptr;
  size_t entries_bytes_ = 0;
  uint32_t sqe_shift_ = 0, cqe_shift_ = 0;  // entries of twice the size
  uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_flags_ = nullptr, *sq_array_ = nullptr;
  uint32_t *cq_head_ = nullptr, *cq_tail_ = nullptr;
  uint32_t sq_mask_ = 0, cq_mask_ = 0, tail_ = 0;
  const uapi::Cqe* cqes_ = nullptr;
  Slots<kFiles> files_;
  Slots<kBuffers> buffers_;
};

}  // namespace mooncake::nvmeof
