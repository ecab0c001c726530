#include "region.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "dma_buf.hpp"
#include "support/memory.hpp"
#include "support/os.hpp"

namespace mooncake::verbs {
namespace {

unsigned rights_of(uint32_t access) {
  unsigned rights = 0;
  if ((access & MC_ACCESS_READ) != 0) rights |= ibv::kRemoteRead;
  if ((access & MC_ACCESS_WRITE) != 0) rights |= ibv::kRemoteWrite | ibv::kLocalWrite;
  return rights;
}

Status check(const mc_memory& memory, const Device& device) {
  Status status =
      driver::check_memory(memory, 1u << MC_DRAM | 1u << MC_CUDA,
                           "the verbs driver moves main memory, and memory of a GPU through a DMA-BUF");
  if (status.ok() && memory.kind == MC_CUDA && device.verbs().reg_dmabuf_mr == nullptr)
    return failed(MC_UNSUPPORTED, "this libibverbs has no ibv_reg_dmabuf_mr; install version 34 or newer");
  return status;
}

// The range keeps the descriptor as long as the region is there: each grant registers the memory again.
Status take_dma_buf(const mc_memory& memory, MemoryRange& range) {
  if (memory.fd < 0) return dma_buf_of(memory.address, memory.length, range.fd, range.fd_offset);
  range.fd = fcntl(memory.fd, F_DUPFD_CLOEXEC, 0);
  range.fd_offset = memory.fd_offset;
  if (range.fd < 0) return system_failure(MC_IO, "cannot duplicate the memory's descriptor", errno);
  return {};
}

}  // namespace

Region::~Region() {
  if (range.fd >= 0) close(range.fd);
}

// Memory within a region that is there is not pinned again. What counts is the range of that region, not what
// its registration spans: that may reach further, into memory of a past region. Nobody tells when such memory
// has become other memory, whose pages the device would not know.
std::shared_ptr<Registration> Regions::shared_with(const MemoryRange& range) {
  if (range.kind != MC_DRAM) return nullptr;
  std::lock_guard lock(mutex_);
  std::erase_if(all_, [](const auto& known) { return known.expired(); });
  for (const auto& weak : all_) {
    auto known = weak.lock();
    if (!known || known->withdrawn || known->range.kind != MC_DRAM) continue;
    const MemoryRange& outer = known->range;
    if (range.address < outer.address || range.length > outer.length) continue;
    if (range.address - outer.address <= outer.length - range.length) return known->local;
  }
  return nullptr;
}

Status Regions::add(const mc_memory& memory, std::shared_ptr<Region>& region) {
  if (Status status = check(memory, *device_); !status.ok()) return status;
  auto made = std::make_shared<Region>();
  made->id = memory.region_id;
  made->range = {memory.address, memory.length, memory.kind, -1, 0};
  if (memory.kind == MC_CUDA) {
    if (Status status = take_dma_buf(memory, made->range); !status.ok()) return status;
  }
  made->grants.push_back({driver::key_from(memory.key), driver::kAllAccess, false, nullptr, {}});
  made->local = shared_with(made->range);
  if (!made->local) {
    Status status = Registration::make(*device_, options_, made->range, ibv::kLocalWrite, made->local);
    if (!status.ok()) return status;
  }
  std::lock_guard lock(mutex_);
  all_.push_back(made);
  region = std::move(made);
  return {};
}

Status Regions::expose(Region& region) {
  {
    std::lock_guard lock(mutex_);
    if (region.grants.front().opened || region.grants.front().revoked) return {};
  }
  std::shared_ptr<Registration> made;
  if (Status status = register_for(region, driver::kAllAccess, made); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  Grant& own = region.grants.front();
  if (!own.opened && !own.revoked) own.opened = std::move(made);
  return {};
}

Status Regions::register_for(const Region& region, uint32_t access, std::shared_ptr<Registration>& made) {
  return Registration::make(*device_, options_, region.range, rights_of(access), made);
}

Status Regions::grant(Region& region, const uint8_t* key, uint32_t access) {
  if (access == 0 || (access & ~driver::kAllAccess) != 0)
    return failed(MC_INVALID, "access " + std::to_string(access) + " is not made of mc_access bits");
  Grant made{driver::key_from(key), access, false, nullptr, {}};
  if (Status status = register_for(region, access, made.opened); !status.ok()) return status;
  std::lock_guard lock(mutex_);
  if (region.withdrawn) return failed(MC_INVALID, "the memory is being given back");
  region.grants.push_back(std::move(made));
  return {};
}

Status Regions::revoke(Region& region, const uint8_t* key, uint64_t deadline_ns) {
  std::vector<std::shared_ptr<Registration>> open;
  std::vector<std::shared_ptr<const std::atomic<bool>>> ended;
  {
    std::lock_guard lock(mutex_);
    bool found = key == nullptr;
    for (Grant& grant : region.grants) {
      if (key != nullptr && !driver::equal_in_constant_time(grant.key.data(), key, MC_KEY_BYTES)) continue;
      grant.revoked = found = true;
      if (grant.opened) grant.ended = grant.opened->ended();
      if (grant.opened) open.push_back(std::move(grant.opened));
      if (grant.ended) ended.push_back(grant.ended);
    }
    if (!found) return failed(MC_INVALID, "the memory has no such key");
  }
  open.clear();  // outside the lock: it takes the device's time
  // A question for the key that is being answered holds its registration for a moment.
  for (const auto& one : ended) {
    while (!one->load(std::memory_order_acquire) && deadline_ns != 0) {
      if (driver::now_ns() >= deadline_ns) return failed(MC_TIMEOUT, "a peer is still being told of the key");
      std::this_thread::yield();
    }
  }
  return {};
}

Status Regions::remove(Region& region, uint64_t deadline_ns) {
  if (Status status = revoke(region, nullptr, deadline_ns); !status.ok()) return status;
  std::unique_lock lock(mutex_);
  region.withdrawn = true;
  ++waiting_;
  while (region.users != 0) {
    uint64_t now = driver::now_ns();
    if (now >= deadline_ns) break;
    unused_.wait_for(lock, std::chrono::nanoseconds(std::min<uint64_t>(deadline_ns - now, 50'000'000)));
  }
  --waiting_;
  if (region.users != 0) return failed(MC_TIMEOUT, "operations of this side still use the memory");
  std::erase_if(all_, [&](const auto& known) { return known.lock().get() == &region; });
  auto ended = std::move(region.local);
  region.local.reset();
  lock.unlock();
  ended.reset();
  return {};
}

Status Regions::open(uint64_t id, const uint8_t* key, Opened& opened) {
  std::lock_guard lock(mutex_);
  for (const auto& weak : all_) {
    std::shared_ptr<Region> region = weak.lock();
    if (!region || region->id != id) continue;
    if (region->withdrawn) break;
    Grant* found = nullptr;
    for (Grant& grant : region->grants) {
      if (driver::equal_in_constant_time(grant.key.data(), key, MC_KEY_BYTES)) found = &grant;
    }
    if (found == nullptr) return failed(MC_REFUSED, "wrong access key for the region");
    if (found->revoked) return failed(MC_REFUSED, "the key of the region was revoked");
    if (!found->opened) return failed(MC_REFUSED, "the region's own key was never given to anybody");
    opened = {found->access, found->opened};
    return {};
  }
  return failed(MC_REFUSED, "the region does not exist, or was closed");
}

void Regions::notify() {
  std::lock_guard lock(mutex_);
  unused_.notify_all();
}

}  // namespace mooncake::verbs
