#include "pool.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <fstream>
#include <map>
#include <system_error>

namespace mooncake::cxl {
namespace {

constexpr uint64_t kDataAlign = 2 << 20;  // huge pages of the data are not shared with the tables
constexpr double kBeatsPerLease = 8;
constexpr long kFirstRestNs = 20'000;
constexpr long kLongestRestNs = 1'000'000;

// The pools of this process. A forked child starts with none: it has not the threads that keep the leases.
struct Registry {
  std::mutex mutex;
  std::map<std::string, std::weak_ptr<Pool>> pools;
};

void read_boot_id(uint8_t* id) {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string text;
  file >> text;
  Digest digest = sha256(text.data(), text.size());
  std::memcpy(id, digest.data(), 16);
}

bool all_zero(const std::byte* bytes, size_t length) {
  return std::all_of(bytes, bytes + length, [](std::byte value) { return value == std::byte{0}; });
}

}  // namespace

Pool::Pool(const PoolRequest& request) : request_(request), generation_(fork_generation()) {}

Status Pool::open(const PoolRequest& request, std::shared_ptr<Pool>& pool) {
  if (request.coherent == Coherent::kNo && !can_flush())
    return failed(MC_UNSUPPORTED,
                  "coherent is false, and this processor has no instruction to flush its caches");
  std::shared_ptr<Pool> made(new Pool(request));
  if (Status status = made->backing_.open(request.backing); !status.ok()) return status;
  std::string name = made->backing_.identity() + " " + std::to_string(request.host);
  auto& known = driver::of_this_process<Registry>();
  std::lock_guard lock(known.mutex);
  if (std::shared_ptr<Pool> found = known.pools[name].lock()) {
    if (found->request_.coherent != request.coherent || found->request_.lease_s != request.lease_s) {
      return failed(MC_INVALID, "this process has the pool " + request.backing.path +
                                    " open with another value of coherent or lease_s");
    }
    pool = std::move(found);
    return {};
  }
  if (Status status = made->backing_.map(request.backing); !status.ok()) return status;
  LockedBacking locked(made->backing_);
  if (Status status = locked.lock(); !status.ok()) return status;
  bool empty = made->size() >= kUnit && all_zero(made->data(), kUnit);
  if (empty && request.backing.create) {
    if (Status status = made->write_header(); !status.ok()) return status;
  }
  if (Status status = made->check_header(); !status.ok()) return status;
  if (Status status = made->join(); !status.ok()) return status;
  known.pools[name] = made;
  pool = std::move(made);
  return {};
}

Status Pool::format(const PoolRequest& request, bool overwrite) {
  std::shared_ptr<Pool> made(new Pool(request));
  if (Status status = made->backing_.open(request.backing); !status.ok()) return status;
  if (Status status = made->backing_.map(request.backing); !status.ok()) return status;
  LockedBacking locked(made->backing_);
  if (Status status = locked.lock(); !status.ok()) return status;
  if (!overwrite && !(made->size() >= kUnit && all_zero(made->data(), kUnit))) {
    return failed(
        MC_INVALID,
        request.backing.path + " is not empty; format it with overwrite=True if nobody needs what is there");
  }
  return made->write_header();
}

Status Pool::write_header() {
  uint64_t tables = kUnit + request_.hosts * kControlBytes;
  uint64_t offset = rounded_up(tables, kDataAlign);
  uint64_t share = size() > offset ? (size() - offset) / request_.hosts / kUnit * kUnit : 0;
  if (share < kLeastShare) {
    return failed(MC_INVALID, request_.backing.path + " has " + std::to_string(size()) +
                                  " bytes; a pool for " + std::to_string(request_.hosts) + " hosts needs " +
                                  std::to_string(offset + request_.hosts * kLeastShare));
  }
  std::memset(data(), 0, tables);
  write_back(data(), tables);  // before the header says that they can be used
  Header made{};
  std::memcpy(made.magic, kMagic, sizeof kMagic);
  made.version = kVersion;
  made.hosts = request_.hosts;
  if (Status status = fill_random(made.uuid, sizeof made.uuid); !status.ok()) return status;
  made.pool_bytes = size();
  made.members = kMembers;
  made.uses = kUses;
  made.grants = kGrants;
  made.blocks = kBlocks;
  made.control_bytes = kControlBytes;
  made.data_offset = offset;
  made.share_bytes = share;
  made.checksum = crc32c(&made, offsetof(Header, checksum));
  std::memcpy(data(), &made, sizeof made);
  write_back(data(), sizeof made);
  return {};
}

Status Pool::check_header() const {
  const std::string& path = request_.backing.path;
  if (size() < kUnit) return failed(MC_INVALID, path + " is smaller than a page");
  drop_lines(data(), sizeof(Header));
  const Header& found = header();
  if (std::memcmp(found.magic, kMagic, sizeof kMagic) != 0) {
    return failed(MC_INVALID, path +
                                  " holds no pool; the option create makes one of an empty file, "
                                  "`Pool.format` of anything");
  }
  if (found.version != kVersion) {
    return failed(MC_INVALID, path + " holds a pool of version " + std::to_string(found.version) +
                                  ", and this driver knows " + std::to_string(kVersion));
  }
  if (found.checksum != crc32c(&found, offsetof(Header, checksum)))
    return failed(MC_IO, path + ": the pool's header is damaged; format it anew");
  bool fits = found.members == kMembers && found.uses == kUses && found.grants == kGrants &&
              found.blocks == kBlocks && found.control_bytes == kControlBytes && found.hosts >= 1 &&
              found.hosts <= kMostHosts && found.data_offset >= kUnit + found.hosts * kControlBytes &&
              found.pool_bytes <= size() && found.data_offset <= found.pool_bytes &&
              found.share_bytes <= (found.pool_bytes - found.data_offset) / found.hosts;
  if (!fits) {
    return failed(MC_INVALID, path + ": the pool was made for " + std::to_string(found.pool_bytes) +
                                  " bytes, of which " + std::to_string(size()) +
                                  " are here, or by a driver of other limits");
  }
  if (request_.host < found.hosts) return {};
  return failed(MC_INVALID, path + ": host is " + std::to_string(request_.host) + ", but the pool is for " +
                                std::to_string(found.hosts) + " hosts, numbered from 0");
}

Pool::~Pool() {
  if (forked()) {
    (void)keeper_.release();  // its thread is not in this process
  } else {
    leave();
  }
}

bool Pool::locate(const void* address, uint64_t length, uint64_t* offset) const {
  auto at = reinterpret_cast<uintptr_t>(address), base = reinterpret_cast<uintptr_t>(data());
  if (at < base || length > size() || at - base > size() - length) return false;
  *offset = at - base;
  return *offset >= header().data_offset;
}

Member& Pool::member_at(uint32_t member) const {
  return reinterpret_cast<Member*>(control(member / kMembers) + kMemberTable)[member % kMembers];
}

Use* Pool::uses(uint32_t member) const {
  return reinterpret_cast<Use*>(control(member / kMembers) + kUseTable) + member % kMembers * kUses;
}

Grant* Pool::grants(uint32_t member) const {
  return reinterpret_cast<Grant*>(control(member / kMembers) + kGrantTable) + member % kMembers * kGrants;
}

// ------------------------------------------------------------------------------------------- membership

Status Pool::join() {
  shows_ = request_.coherent == Coherent::kNo || (request_.coherent == Coherent::kAuto && hosts() > 1);
  if (shows_ && !can_flush())
    return failed(MC_UNSUPPORTED,
                  "this processor cannot flush its caches, which a pool of several hosts needs");
  watches_ = std::vector<Watch>(hosts() * kMembers);
  if (Status status = check_other_machines(); !status.ok()) return status;
  reclaim();
  std::vector<BlockView> taken;
  if (Status status = read_blocks(&taken); !status.ok()) return status;
  if (Status status = find_place(); !status.ok()) return status;
  Member& own = member_at(member_);
  epoch_ = (own.word.load() >> 1) + 1;
  read_boot_id(own.boot_id);
  own.pid = static_cast<uint32_t>(getpid());
  own.beat.store(1);
  own.life.store(0);
  for (uint32_t i = 0; i < kUses; ++i) uses(member_)[i].grant.store(0);
  std::atomic<int> started{0};
  keeper_ = std::make_unique<Keeper>();
  try {
    keeper_->thread = std::thread([this, &started] { keep_lease(*keeper_, &started); });
  } catch (const std::system_error& error) {
    return failed(MC_NO_MEMORY, std::string("cannot start the thread that keeps the lease: ") + error.what());
  }
  started.wait(0);
  if (started.load() < 0)
    return failed(MC_UNSUPPORTED,
                  "this kernel has no robust futexes, by which others see that a process ended");
  show(uses(member_), kUses * sizeof(Use));
  own.word.store(epoch_ << 1 | 1);
  show(&own, sizeof own);
  joined_ = true;
  return {};
}

Status Pool::find_place() {
  // Not where somebody who lives still copies from or to what a dead member had: its grants say where.
  std::vector<Span> spans;
  std::vector<bool> named(hosts() * kMembers);
  busy_spans(&spans, &named);
  for (uint32_t i = 0; i < kMembers; ++i) {
    member_ = request_.host * kMembers + i;
    if ((member_at(member_).word.load() & 1) == 0 && !named[member_]) return {};
  }
  return failed(MC_NO_MEMORY, "the pool " + request_.backing.path + " has " + std::to_string(kMembers) +
                                  " members of this host already, as many as it can");
}

// Two machines under one number would both believe that the share is theirs. A member that another boot left
// behind is dead, unless its beat goes on: then that machine runs.
Status Pool::check_other_machines() {
  uint8_t boot_id[16];
  read_boot_id(boot_id);
  std::vector<std::pair<uint32_t, uint64_t>> others;
  for (uint32_t i = 0; i < kMembers; ++i) {
    uint32_t number = request_.host * kMembers + i;
    Member& member = member_at(number);
    if (shows_) drop_lines(&member, sizeof member);
    bool there = (member.word.load() & 1) != 0;
    if (there && std::memcmp(member.boot_id, boot_id, sizeof boot_id) != 0)
      others.emplace_back(number, member.beat.load());
  }
  if (others.empty()) return {};
  std::this_thread::sleep_for(std::chrono::duration<double>(request_.lease_s));
  for (const auto& [number, beat] : others) {
    Member& member = member_at(number);
    drop_lines(&member, sizeof member);
    if (member.beat.load() != beat) {
      return failed(MC_INVALID, "another machine uses the pool " + request_.backing.path + " as host " +
                                    std::to_string(request_.host) + "; give each its own number");
    }
  }
  for (const auto& [number, beat] : others) member_at(number).life.store(FUTEX_OWNER_DIED);
  return {};
}

void Pool::keep_lease(Keeper& keeper, std::atomic<int>* started) {
  prepare_thread("mc-cxl-lease");
  Member& own = member_at(member_);
  keeper.head.list.next = &keeper.entry;
  keeper.head.list_op_pending = nullptr;
  keeper.head.futex_offset = reinterpret_cast<char*>(&own.life) - reinterpret_cast<char*>(&keeper.entry);
  keeper.entry.next = &keeper.head.list;
  // It takes the place of the C library's list, which is empty: this thread locks no robust mutex.
  bool held = syscall(SYS_set_robust_list, &keeper.head, sizeof keeper.head) == 0;
  if (held) own.life.store(static_cast<uint32_t>(syscall(SYS_gettid)));
  started->store(held ? 1 : -1);
  started->notify_one();
  if (!held) return;
  auto rest = std::chrono::duration<double>(request_.lease_s / kBeatsPerLease);
  std::unique_lock lock(keeper.mutex);
  while (!keeper.stop.wait_for(lock, rest, [&] { return keeper.stopping; })) {
    own.beat.fetch_add(1);
    show(&own.beat, sizeof own.beat);
  }
  own.life.store(FUTEX_OWNER_DIED);
}

void Pool::leave() {
  if (joined_) {
    LockedBacking locked(backing_);
    // Without the lock, who comes next finds the member dead, and does the same.
    if (locked.lock().ok()) {
      for (uint32_t i = 0; i < kGrants; ++i) end_grant(i);
      Member& own = member_at(member_);
      own.word.store(epoch_ << 1);
      show(&own, sizeof own);
      reclaim();
    }
  }
  if (!keeper_) return;
  {
    std::lock_guard lock(keeper_->mutex);
    keeper_->stopping = true;
  }
  keeper_->stop.notify_all();
  if (keeper_->thread.joinable()) keeper_->thread.join();
}

bool Pool::has_died(uint32_t member) const {
  uint32_t life = member_at(member).life.load(std::memory_order_acquire);
  return life == 0 || (life & FUTEX_OWNER_DIED) != 0;
}

bool Pool::alive(uint32_t member, uint64_t epoch) {
  Member& other = member_at(member);
  see(&other, sizeof other, member);
  if (other.word.load(std::memory_order_acquire) != (epoch << 1 | 1)) return false;
  if (same_host(member)) return !has_died(member);
  Watch& watch = watches_[member];
  uint64_t beat = other.beat.load(std::memory_order_acquire), now = now_ns();
  if (watch.epoch.exchange(epoch) != epoch || watch.beat.exchange(beat) != beat) {
    watch.seen_ns.store(now);
    return true;
  }
  return now - watch.seen_ns.load() < static_cast<uint64_t>(request_.lease_s * 1e9);
}

// --------------------------------------------------------------------------------------- grants and uses

Status Pool::add_grant(uint64_t region_id, uint64_t offset, uint64_t length, uint32_t access,
                       const Digest& key, uint32_t* index, uint64_t* generation) {
  std::lock_guard lock(grants_mutex_);
  if (!free_grants_.empty()) {
    *index = free_grants_.back();
    free_grants_.pop_back();
  } else if (grants_used_ < kGrants) {
    *index = grants_used_++;
  } else {
    return failed(MC_NO_MEMORY, "this process has given " + std::to_string(kGrants) +
                                    " keys to memory of the pool, as many as it can; revoke some");
  }
  Grant& grant = grants(member_)[*index];
  *generation = (grant.word.load() >> 1) + 1;
  grant.region_id = region_id;
  grant.offset = offset;
  grant.length = length;
  grant.access = access;
  std::memcpy(grant.key_digest, key.data(), key.size());
  show(&grant, sizeof grant);  // the word last: who sees it valid sees the rest
  grant.word.store(valid_word(*generation));
  show(&grant, sizeof grant);
  return {};
}

void Pool::end_grant(uint32_t index) {
  Grant& grant = grants(member_)[index];
  uint64_t word = grant.word.load();
  if ((word & 1) == 0) return;
  grant.word.store(word & ~uint64_t{1});
  show(&grant, sizeof grant);
  full_fence();  // then look who has begun before
}

std::optional<uint32_t> Pool::user_of(uint32_t owner, uint32_t index) {
  uint64_t name = grant_name(owner, index);
  for (uint32_t number = 0; number < hosts() * kMembers; ++number) {
    Member& member = member_at(number);
    if (!same_host(number)) see(&member, sizeof member, number);
    uint64_t word = member.word.load();
    if ((word & 1) == 0 || !alive(number, word >> 1)) continue;
    Use* table = uses(number);
    see(table, kUses * sizeof(Use), number);
    for (uint32_t i = 0; i < kUses; ++i) {
      if (table[i].grant.load() == name) return number;
    }
  }
  return std::nullopt;
}

Status Pool::wait_unused(uint32_t index, uint64_t deadline_ns) {
  timespec rest{0, kFirstRestNs};
  while (std::optional<uint32_t> user = user_of(member_, index)) {
    if (now_ns() >= deadline_ns) {
      std::string who = "process " + std::to_string(member_at(*user).pid);
      if (!same_host(*user)) who += " of host " + std::to_string(*user / kMembers);
      return failed(MC_TIMEOUT, who + " still copied from or to the memory at the deadline");
    }
    nanosleep(&rest, nullptr);
    rest.tv_nsec = std::min(2 * rest.tv_nsec, kLongestRestNs);
  }
  return {};
}

void Pool::free_grant(uint32_t index) {
  std::lock_guard lock(grants_mutex_);
  free_grants_.push_back(index);
}

uint32_t Pool::begin_use(uint32_t member, uint32_t index) {
  uint64_t taken = used_.load(std::memory_order_relaxed);
  uint32_t use = 0;
  do {
    while (taken == ~uint64_t{0}) {  // more threads copy at once than there are words for
      std::this_thread::yield();
      taken = used_.load(std::memory_order_relaxed);
    }
    use = static_cast<uint32_t>(std::countr_one(taken));
  } while (!used_.compare_exchange_weak(taken, taken | uint64_t{1} << use, std::memory_order_acquire));
  Use& word = uses(member_)[use];
  word.grant.store(grant_name(member, index));  // in one order with the look at the grant that follows
  if (bypasses_caches(member)) {
    write_back(&word, sizeof word);
    full_fence();
  }
  return use;
}

void Pool::end_use(uint32_t use, uint32_t member) {
  Use& word = uses(member_)[use];
  word.grant.store(0, std::memory_order_release);
  if (bypasses_caches(member)) write_back(&word, sizeof word);
  used_.fetch_and(~(uint64_t{1} << use), std::memory_order_release);
}

}  // namespace mooncake::cxl
