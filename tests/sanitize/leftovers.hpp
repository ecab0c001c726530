// What a program that was sent nonsense for long must not have more of: memory and descriptors.
#pragma once

#include <dirent.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>

namespace sanitized {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kTellsGrowth = false;  // freed memory stays in quarantine; they find leaks themselves
#else
constexpr bool kTellsGrowth = true;
#endif

inline size_t open_descriptors() {
  DIR* folder = opendir("/proc/self/fd");
  size_t count = 0;
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

inline size_t resident_bytes() {
  FILE* file = fopen("/proc/self/statm", "r");
  unsigned long total = 0, resident = 0;
  if (file == nullptr || fscanf(file, "%lu %lu", &total, &resident) != 2) abort();
  fclose(file);
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The most memory and descriptors in the first half of the work against those at its end: what the work needs
// it has by then, and a leak goes on growing. `halfway()` while the first half goes on, as often as may be.
class Leftovers {
 public:
  void halfway() {
    if (size_t now = resident_bytes(); now > memory_) memory_ = now;
  }
  // In bytes, 0 when there is less than there was.
  size_t grown() const {
    size_t now = resident_bytes();
    return now > memory_ ? now - memory_ : 0;
  }
  bool fine() const { return !kTellsGrowth || grown() <= kAllowed; }

 private:
  static constexpr size_t kAllowed = 4u << 20;  // of pages that malloc keeps or gives back as it likes
  size_t memory_ = resident_bytes();
};

}  // namespace sanitized
