// Whether this process is a forked child of the one that made something. It costs no system call to ask.
#pragma once

#include <pthread.h>

#include <atomic>

namespace mooncake {

inline std::atomic<unsigned> forks{0};  // between the first process and this one
inline const int forks_counted = pthread_atfork(nullptr, nullptr, [] { ++forks; });

class Origin {
 public:
  bool forked() const { return forks.load(std::memory_order_relaxed) != made_after_; }

 private:
  unsigned made_after_ = forks.load();
};

}  // namespace mooncake
