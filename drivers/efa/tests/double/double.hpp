// A libfabric in one process, with the rules of efa-direct or, when a test asks for it, of fabric efa: what
// SRD and its provider allow and forbid, nothing is promised beyond. Memory has to be registered and keys are
// checked; writes, their data and messages arrive in any order; an endpoint that is closed leaves what it
// sent in the network; queues are as small as they say; and a thread, context or descriptor that may not be
// used ends the program with the reason.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "libfabric_abi.hpp"

namespace fabric_double {

namespace fi = mooncake::efa::fi;

constexpr size_t kTransmitSize = 512;
constexpr size_t kReceiveSize = 512;
constexpr size_t kMaxBytes = 1 << 20;
enum Offer : int { kOfferDirect = 1, kOfferEfa = 2 };

struct Queue;
struct Port;

struct Memory {
  fi::Memory handle{};
  struct Domain* domain = nullptr;
  uint64_t start = 0, length = 0, access = 0;
};

struct Domain {
  fi::Domain handle{};
};

struct Completion {
  fi::QueueEntry entry{};
  int error = 0;
};

// One thread at a time uses a queue and the endpoints bound to it.
struct Queue {
  fi::Queue handle{};
  std::deque<Completion> ready;
  std::vector<fi::QueueEntry> at_once;  // a ring: of operations that were over when they were posted
  size_t first = 0, count = 0;
  std::atomic<int> inside{0};
};

struct Addresses {
  fi::AddressTable handle{};
  std::vector<uint64_t> known;
};

struct Receive {
  void* buffer;
  size_t length;
  void* context;
};

// What is on its way.
struct Item {
  enum class What : uint8_t { kSend, kWrite, kRead } what = What::kSend;
  Port* source = nullptr;  // null once it was closed: nobody learns of the end
  uint64_t target = 0;     // address
  void* local = nullptr;
  uint64_t remote = 0, key = 0, length = 0, data = 0;
  bool has_data = false;
  void* context = nullptr;
  std::vector<char> bytes;  // a send's, or a write's whose source was closed
};

struct Port {
  fi::Endpoint handle{};
  Queue* queue = nullptr;
  Addresses* addresses = nullptr;
  uint64_t address = 0;
  size_t limit = 0;
  size_t under_way = 0;
  std::deque<Receive> receives;
  std::deque<Item> unread;  // messages without a receive
  std::deque<Item> behind;  // posted with FI_MORE: no doorbell was rung for them yet
};

// All of it under one mutex, but for what is done at once: that takes none.
struct Network {
  static Network& get();
  std::recursive_mutex mutex;
  std::mt19937_64 random{1};
  bool at_once = false;               // operations are over when they are posted, and move nothing
  std::chrono::microseconds pace{0};  // not 0: so long from one arrival to the next
  std::chrono::steady_clock::time_point last;
  uint64_t next_address = 1;
  uint64_t next_key = 0x5eed;
  std::unordered_map<uint64_t, Port*> ports;
  std::map<uint64_t, Memory*> memory;
  std::vector<Item> items;
  std::set<void*> contexts;
  uint64_t doorbells = 0, posted = 0;
  int offers = kOfferDirect;                          // of Offer: the fabrics that there are
  std::string opened;                                 // the last one
  bool needs_local = true;                            // on it
  std::map<uint64_t, std::pair<uint64_t, int>> gpus;  // what is memory of a GPU: begin to end, and which
  uint64_t gpu_registrations = 0;

  // Lets some of what is on its way arrive, whichever.
  void advance();
  void deliver(Item& item);
  // Of which GPU the memory is; -1: main memory.
  int gpu_of(const void* address) const;
  void finish(const Item& item, int error);
  Memory* find(uint64_t key, uint64_t address, uint64_t length, uint64_t access);
};

[[noreturn]] void broken_rule(const char* what);

}  // namespace fabric_double
