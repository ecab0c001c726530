// A pool that this process has mapped, and this process as one of its members.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <linux/futex.h>

#include "backing.hpp"
#include "digest.hpp"
#include "flush.hpp"
#include "layout.hpp"

namespace mooncake::cxl {

enum class Coherent { kAuto, kYes, kNo };

struct PoolRequest {
  Backing::Request backing;
  uint32_t host = 0;   // the number of this host among those that map the pool
  uint32_t hosts = 1;  // how many shares a pool gets that is formatted here
  Coherent coherent = Coherent::kAuto;
  double lease_s = 4.0;  // a member of another host whose beat stands still for so long has gone
};

// Everything about one pool in one process; endpoints and blocks share it. Thread-safe.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // Maps it, formats it when it is empty and `create` says so, and joins. The same pool is given again where
  // this process has it already. MC_INVALID: what is there is no pool, or another version, or damaged.
  static Status open(const PoolRequest& request, std::shared_ptr<Pool>& pool);
  // Writes a new, empty pool over whatever is there. MC_INVALID when there is one and `overwrite` is off.
  static Status format(const PoolRequest& request, bool overwrite);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  std::byte* data() const { return backing_.data(); }
  uint64_t size() const { return backing_.size(); }
  const uint8_t* uuid() const { return header().uuid; }
  uint32_t hosts() const { return header().hosts; }
  uint32_t host() const { return request_.host; }
  uint32_t member() const { return member_; }
  uint64_t epoch() const { return epoch_; }
  const PoolRequest& request() const { return request_; }
  // A forked child has the mapping but not the thread that keeps the lease.
  bool forked() const { return fork_generation() != generation_; }
  // Where `address` lies in the pool; false unless all of the range is data of some share.
  bool locate(const void* address, uint64_t length, uint64_t* offset) const;

  // ---- members

  bool same_host(uint32_t member) const { return member / kMembers == request_.host; }
  bool knows(uint32_t member) const { return member < hosts() * kMembers; }
  // Whether what goes to or comes from this member has to pass by the caches.
  bool bypasses_caches(uint32_t member) const {
    if (request_.coherent == Coherent::kAuto) return !same_host(member);
    return request_.coherent == Coherent::kNo;
  }
  // Whether a member is there in this epoch, as far as its host's kernel or its beat tells.
  bool alive(uint32_t member, uint64_t epoch);

  // ---- what this process gives to others

  // MC_NO_MEMORY when the table is full.
  Status add_grant(uint64_t region_id, uint64_t offset, uint64_t length, uint32_t access, const Digest& key,
                   uint32_t* index, uint64_t* generation);
  // From now on nobody begins to copy under it.
  void end_grant(uint32_t index);
  // MC_TIMEOUT names who still copied under it at the deadline.
  Status wait_unused(uint32_t index, uint64_t deadline_ns);
  // The slot may be given again: wait_unused() was good.
  void free_grant(uint32_t index);

  // ---- what this process does with grants of others

  const Grant& grant_of(uint32_t member, uint32_t index) const { return grants(member)[index]; }
  // Tells the owner of a grant that this thread is about to touch its memory. Then look whether it is valid.
  uint32_t begin_use(uint32_t member, uint32_t index);
  void end_use(uint32_t use, uint32_t member);
  // What another host may have changed is read from memory.
  void see(const void* address, size_t length, uint32_t member) const {
    if (bypasses_caches(member)) drop_lines(address, length);
  }

  // ---- blocks, see blocks.cpp

  struct BlockView {
    uint32_t index;
    uint64_t offset;
    uint64_t length;
    bool kept;
    bool owned;  // by a member that lives
    std::string name;
  };
  // Finds room in this host's share. The bytes are zero. MC_NO_MEMORY: there is none; MC_INVALID: the name is
  // taken, too long, or missing for a block that is to be kept.
  Status allocate(uint64_t length, const std::string& name, bool kept, BlockView* block);
  // Takes over a kept block whose owner has gone. MC_INVALID: there is none of the name, or it has an owner.
  Status adopt(const std::string& name, BlockView* block);
  // Gives it back: a kept one stays in the pool for who adopts it.
  void release(uint32_t index);
  // Removes a kept block that nobody owns.
  Status drop(const std::string& name);
  Status list(std::vector<BlockView>* blocks);
  Status free_bytes(uint64_t* bytes);

 private:
  struct Span {
    uint64_t offset;
    uint64_t length;
  };
  // When a member of another host was last seen to move.
  struct Watch {
    std::atomic<uint64_t> beat{0};
    std::atomic<uint64_t> seen_ns{0};
    std::atomic<uint64_t> epoch{0};
  };

  // The thread that keeps the lease. Apart, because a forked child cannot destroy what a thread waits in.
  struct Keeper {
    std::mutex mutex;
    std::condition_variable stop;
    bool stopping = false;
    std::thread thread;
    robust_list_head head{};  // the kernel reads both when the thread ends
    robust_list entry{};
  };

  explicit Pool(const PoolRequest& request);
  Status check_header() const;
  Status write_header();
  Status join();
  Status find_place();
  Status check_other_machines();
  void leave();
  void keep_lease(Keeper& keeper, std::atomic<int>* started);
  bool has_died(uint32_t member) const;
  std::optional<uint32_t> user_of(uint32_t owner, uint32_t index);

  const Header& header() const { return *reinterpret_cast<const Header*>(data()); }
  std::byte* control(uint32_t host) const { return data() + kUnit + host * kControlBytes; }
  Member& member_at(uint32_t member) const;
  Use* uses(uint32_t member) const;
  Grant* grants(uint32_t member) const;
  Block* blocks() const { return reinterpret_cast<Block*>(control(request_.host) + kBlockTable); }
  uint64_t share_offset() const { return header().data_offset + request_.host * header().share_bytes; }
  // After a change that other hosts look at.
  void show(const void* address, size_t length) const {
    if (shows_) write_back(address, length);
  }

  // With the lock held.
  Status read_blocks(std::vector<BlockView>* taken);
  bool owned(const Block& block) const;
  void reclaim();
  void retire(uint32_t member);
  uint32_t block_checksum(uint32_t index) const;
  Status find_room(uint64_t length, uint64_t* offset);
  void take(uint32_t index, uint64_t offset, uint64_t length, const std::string& name, bool kept);
  // What members that live copy from or to now, and whose it is or was.
  void busy_spans(std::vector<Span>* spans, std::vector<bool>* owners);

  const PoolRequest request_;
  const uint32_t generation_;
  Backing backing_;
  bool shows_ = false;
  uint32_t member_ = 0;
  uint64_t epoch_ = 0;
  bool joined_ = false;

  std::vector<Watch> watches_;
  std::atomic<uint64_t> used_{0};  // a bit for each of the member's uses

  std::mutex grants_mutex_;
  std::vector<uint32_t> free_grants_;
  uint32_t grants_used_ = 0;

  std::unique_ptr<Keeper> keeper_;
};

}  // namespace mooncake::cxl
