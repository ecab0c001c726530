// Memory registered with a fake device: who may touch it, and its bytes wherever they lie.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "mooncake_driver.h"

namespace mooncake::fake {

struct Result {
  mc_status code = MC_OK;
  std::string reason;
  bool ok() const { return code == MC_OK; }
};

// Guarded by the fabric's mutex, but for load(), store() and bytes(), which read nothing that changes.
class Memory {
 public:
  // Duplicates the descriptor of files and block devices. Throws std::runtime_error when that fails.
  Memory(const mc_memory& memory, bool cuda_is_host);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  struct Key {
    uint8_t bytes[MC_KEY_BYTES];
    uint32_t access;
    bool revoked = false;
    uint32_t uses = 0;  // operations of peers that run under it
  };

  uint64_t region_id() const { return memory_.region_id; }
  uint64_t length() const { return memory_.length; }
  bool contains(uint64_t offset, uint64_t length) const {
    return offset <= memory_.length && length <= memory_.length - offset;
  }

  void grant(const uint8_t* bytes, uint32_t access);
  // The index of a key in keys(), or -1.
  int find(const uint8_t* bytes) const;
  // Whether a peer may do this; the index of the key it used is in `*key`.
  Result admit(const uint8_t* bytes, mc_opcode opcode, uint64_t offset, uint64_t length, int* key) const;
  std::vector<Key>& keys() { return keys_; }
  uint32_t uses() const;

  bool closing = false;

  // Move bytes between this memory and a buffer. False with errno when the operating system fails.
  bool load(uint64_t offset, char* to, size_t size) const;
  bool store(uint64_t offset, const char* from, size_t size) const;
  // The bytes themselves, or null when they have no address here.
  char* bytes(uint64_t offset) const;

 private:
  bool is_file() const { return memory_.kind == MC_FILE || memory_.kind == MC_BLOCK; }

  mc_memory memory_;
  bool cuda_is_host_;
  int fd_ = -1;
  std::vector<Key> keys_;
};

// Copies between two memories through whatever they are. Bytes of GPUs count as moved and stay where they
// are.
Result move_bytes(const Memory& to, uint64_t to_offset, const Memory& from, uint64_t from_offset,
                  uint64_t size);

}  // namespace mooncake::fake
