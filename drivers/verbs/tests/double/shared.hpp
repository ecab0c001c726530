// What all processes that use the double share: the table of queue pairs and of memory regions, as the
// network would show them. A file, mapped.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>

namespace verbs_double {

constexpr uint32_t kQps = 1 << 12;
constexpr uint32_t kMrs = 1 << 14;
constexpr uint32_t kDevices = 8;
constexpr uint32_t kReceives = 16;

// A mutex that survives the death of its holder.
struct Lock {
  pthread_mutex_t mutex;
  void init() {
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&mutex, &attr);
    pthread_mutexattr_destroy(&attr);
  }
  void lock() {
    if (pthread_mutex_lock(&mutex) == EOWNERDEAD) pthread_mutex_consistent(&mutex);
  }
  void unlock() { pthread_mutex_unlock(&mutex); }
};

struct QpEntry {
  Lock lock;  // held while a peer's request is applied through this queue pair
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> number;  // 0: free
  std::atomic<int> state;
  uint32_t device, pd, access;
  uint32_t dest, rq_psn, sq_psn, dest_device;
  int mtu;
  uint32_t max_dest_rd_atomic;
  uint8_t traffic_class, service_level;
  // Buffers that wait for messages, and what has come: both guarded by the lock.
  struct Receive {
    uint64_t id, address;
    uint32_t room, length, immediate;
    bool placed;  // no message, but a write with this immediate
  } receives[kReceives], received[kReceives];
  uint32_t receives_count, received_count;
};

struct MrEntry {
  Lock lock;  // held while a device touches the memory
  std::atomic<int32_t> pid;
  std::atomic<uint32_t> key;  // 0: free
  uint32_t pd, access, device;
  uint64_t address, iova, length;
  uint64_t mapped;  // bytes of a DMA-BUF, mapped for it; 0: memory of the process
};

struct Fabric {
  // Tests write these first bytes.
  std::atomic<uint8_t> down[kDevices];      // the port has no link
  std::atomic<uint8_t> frozen[kDevices];    // nothing that was posted is carried out
  std::atomic<uint64_t> violations;         // of the rules of verbs
  std::atomic<uint64_t> carried[kDevices];  // bytes that left by the device
  std::atomic<uint8_t> sluggish[kDevices];  // takes its time to end queue pairs: until this is 0 again
  std::atomic<uint32_t> gather;             // registrations wait until so many are under way at once,
  std::atomic<uint32_t> registering;        // which are counted here,
  std::atomic<uint32_t> most_registering;   // and this is the most there ever were
  std::atomic<uint32_t> ready;
  std::atomic<uint32_t> next;  // for numbers and keys
  Lock table;
  QpEntry qps[kQps];
  MrEntry mrs[kMrs];
};

}  // namespace verbs_double
