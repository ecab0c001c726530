// What regions other than memory lie on.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>

#include "identity.hpp"
#include "os.hpp"
#include "support/handles.hpp"

namespace mooncake::nvmeof {

class Io;
struct Piece;

// Blocks that a thread is about to read, change and write back. Thread-safe.
class BlockLocks {
 public:
  void lock(uint64_t block) {
    std::unique_lock lock(mutex_);
    freed_.wait(lock, [&] { return taken_.insert(block).second; });
  }
  void unlock(uint64_t block) {
    {
      std::lock_guard lock(mutex_);
      taken_.erase(block);
    }
    freed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable freed_;
  std::set<uint64_t> taken_;
};

// A file, a block device or a namespace. Thread-safe.
class Device {
 public:
  virtual ~Device() = default;

  const std::string& name() const { return name_; }  // for messages
  // Direct operations: offsets and lengths are multiples of granule(), addresses of memory_align(), and none
  // goes beyond direct_limit(). A granule of 1: anything goes.
  uint64_t granule() const { return granule_; }
  uint64_t memory_align() const { return memory_align_; }
  uint64_t direct_limit() const { return direct_limit_; }
  bool writable() const { return writable_; }
  // Never given twice in a process: what is kept for a device is found by it.
  uint64_t serial() const { return serial_; }

  // Moves bytes and waits for it. Direct, or all of it beyond direct_limit().
  virtual Status run(mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length, bool durable) = 0;
  // For io_uring: the descriptor that moves the bytes of a direct operation; -1: there is none.
  virtual int direct_fd() const { return -1; }
  // By which another process reaches it, where the kernel has no descriptor of it.
  virtual std::string url() const { return {}; }
  // By which another host finds it among its own block devices.
  virtual Status identity(Identity&) const { return failed(MC_UNSUPPORTED, name_ + " has no identity"); }
  // A descriptor that goes through the page cache, for what lies beyond direct_limit(); -1: there is none.
  virtual int buffered_fd() const { return -1; }
  // The same for NVMe commands: -1 where there is no such device, or this piece is too long for one.
  virtual int command_fd(uint64_t) const { return -1; }
  virtual uint32_t nsid() const { return 0; }
  // Starts a direct operation that will end with Io::finished(). False: the device has run() only.
  virtual bool start(Io&, Piece&) { return false; }
  // No operation is under way and none will come: ends what the device has of threads and connections.
  virtual void close() {}
  // How long writes that have failed may still be applied.
  virtual uint64_t late_ns() { return 0; }

  // Around the reading, changing and writing back of one granule, also between processes.
  virtual Status lock(uint64_t block) {
    locks_.lock(block);
    return {};
  }
  virtual void unlock(uint64_t block) { locks_.unlock(block); }

  // "cannot write 4096 bytes at offset 8192 of /data/file: No space left on device"
  Status failure(mc_opcode opcode, uint64_t offset, uint64_t length, const std::string& why) const {
    std::string what = opcode == MC_READ ? "cannot read " : "cannot write ";
    return failed(MC_IO, what + std::to_string(length) + " bytes at offset " + std::to_string(offset) +
                             " of " + name_ + ": " + why);
  }

 protected:
  const uint64_t serial_ = driver::new_serial();
  std::string name_;
  uint64_t granule_ = 1, memory_align_ = 1, direct_limit_ = ~uint64_t{0};
  bool writable_ = true;
  BlockLocks locks_;
};

}  // namespace mooncake::nvmeof
