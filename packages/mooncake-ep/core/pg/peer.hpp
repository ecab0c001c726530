// One process of the group as the others see it: its memory and whether it lives.
#pragma once

#include <string>

#include "layout.hpp"
#include "shared_memory.hpp"

namespace mooncake::ep::pg {

class Peer {
 public:
  Peer() = default;
  // This process's own memory, not yet claimed.
  static Peer own(uint64_t group_id, const Layout& layout);
  // The memory of whoever made `claim`. Throws std::runtime_error when it is gone.
  static Peer open(uint64_t group_id, uint64_t claim);

  bool mapped() const { return memory_.mapped(); }
  uint8_t* base() const { return memory_.data(); }
  const SharedMemory& memory() const { return memory_; }
  MemoryHeader& header() const { return *reinterpret_cast<MemoryHeader*>(memory_.data()); }
  // Whether the process has ended. One system call.
  bool dead() const;

 private:
  SharedMemory memory_;
  driver::UniqueFd process_;
};

}  // namespace mooncake::ep::pg
