// A peer's region, as an initiator knows it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "os.hpp"
#include "pool.hpp"

namespace mooncake::cxl {

// One peer endpoint. A closed one is told from a live one by its grants, a dead one by its member.
struct Connection {
  uint64_t id = 0;
  uint32_t member = 0;
  uint64_t epoch = 0;
};

class RemoteRegion {
 public:
  RemoteRegion(Pool& pool, const Connection& connection, const KeyBlob& blob, uint64_t region_id,
               const Digest& key)
      : connection_id(connection.id), pool_(pool), blob_(blob), region_id_(region_id), key_(key) {}

  const uint64_t connection_id;

  // Between enter() and leave() the owner does not give the memory away. A failed enter() needs no leave().
  Status enter(uint32_t* use);
  void leave(uint32_t use) { pool_.end_use(use, blob_.member); }
  // After enter(): MC_REFUSED when the range is not inside the region, or the key does not allow it.
  Status check(mc_opcode opcode, uint64_t offset, uint64_t length) const;
  // After check(). Bytes for and from memory that is not coherent pass by the caches.
  void copy(mc_opcode opcode, std::byte* local, uint64_t offset, uint64_t length, Stores stores) const;
  // After the copies, before leave(): memory of the dead must not look like success.
  Status check_alive() const;

 private:
  const Grant& grant() const { return pool_.grant_of(blob_.member, blob_.index); }
  Status verify();
  Status refusal() const;

  Pool& pool_;
  const KeyBlob blob_;
  const uint64_t region_id_;
  const Digest key_;
  // What the grant says, once its key was compared: a grant that is still valid still says it.
  std::atomic<bool> verified_{false};
  std::atomic<uint64_t> offset_{0}, length_{0};
  std::atomic<uint32_t> access_{0};
};

}  // namespace mooncake::cxl
