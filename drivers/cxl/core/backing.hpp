// What a pool lies in: a DAX device, or a file on pmem, hugetlbfs or tmpfs.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "os.hpp"

namespace mooncake::cxl {

// Opened and mapped as a whole, shared. Thread-safe.
class Backing {
 public:
  struct Request {
    std::string path;
    uint64_t size_bytes = 0;  // what a new file gets; 0: take it as it is
    bool create = false;      // make the file where there is none
    int numa_node = -1;       // bind a file's memory to this node
  };

  Backing() = default;
  ~Backing();
  Backing(const Backing&) = delete;
  Backing& operator=(const Backing&) = delete;

  // Opens and looks, without mapping: enough for identity().
  Status open(const Request& request);
  Status map(const Request& request);

  std::byte* data() const { return data_; }
  uint64_t size() const { return size_; }
  bool is_device() const { return device_; }
  // Which file it is, whatever path leads to it.
  std::string identity() const { return identity_; }

  // Keeps other processes of this host out of the pool's tables. The kernel gives the lock back when a
  // process ends. MC_TIMEOUT: somebody else held it all the time.
  Status lock(uint64_t deadline_ns);
  void unlock();

 private:
  Status look_at_device(dev_t number);
  Status look_at_file(const Request& request, uint64_t size);
  Status bind(int numa_node);
  Status back_with_pages();
  Status no_memory(int error, std::string what) const;

  UniqueFd fd_;
  std::string path_;
  std::string identity_;
  bool device_ = false;
  bool made_here_ = false;
  uint64_t huge_page_ = 0;  // of a file on hugetlbfs
  std::byte* data_ = nullptr;
  uint64_t size_ = 0;
  std::timed_mutex mutex_;  // flock() is one lock for all threads of a process
};

// Holds the lock while it lives, once lock() said MC_OK.
class LockedBacking {
 public:
  explicit LockedBacking(Backing& backing) : backing_(backing) {}
  ~LockedBacking() {
    if (held_) backing_.unlock();
  }
  LockedBacking(const LockedBacking&) = delete;
  LockedBacking& operator=(const LockedBacking&) = delete;

  Status lock();

 private:
  Backing& backing_;
  bool held_ = false;
};

}  // namespace mooncake::cxl
