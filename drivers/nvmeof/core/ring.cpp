#include "ring.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

namespace mooncake::nvmeof {

using namespace uapi;

namespace {

int register_with(int ring, uint32_t what, const void* argument, uint32_t count) {
  return static_cast<int>(syscall(SYS_io_uring_register, ring, what, argument, count));
}

Status refusal(int error) {
  std::string why = std::generic_category().message(error);
  if (error == EPERM) why += " (sysctl kernel.io_uring_disabled, or a seccomp filter of the container)";
  if (error == ENOSYS) why += " (a kernel older than 5.1, or a seccomp filter of the container)";
  return failed(MC_UNSUPPORTED, "io_uring cannot be used here: " + why);
}

}  // namespace

Status Ring::open(uint32_t entries, uint32_t flags, std::unique_ptr<Ring>& out) {
  std::unique_ptr<Ring> ring(new Ring);
  Params params{};
  params.flags = flags | kSetupClamp | kSetupCqSize;
  params.cq_entries = 2 * std::bit_ceil(entries);
  ring->fd_.reset(static_cast<int>(syscall(SYS_io_uring_setup, entries, &params)));
  if (!ring->fd_.valid()) return refusal(errno);
  constexpr uint32_t kNeeded = kFeatureSingleMmap | kFeatureNodrop;
  if ((params.features & kNeeded) != kNeeded)
    return failed(MC_UNSUPPORTED, "the io_uring of this kernel is too old; Linux 5.6 or newer is needed");
  if (Status status = ring->map(params); !status.ok()) return status;
  ring->probe();
  if (!ring->supports(kRead) || !ring->supports(kWrite))
    return failed(MC_UNSUPPORTED, "the io_uring of this kernel does not read and write files");
  ring->has_files_ = ring->make_table(kRegisterFiles2, kFiles);
  ring->has_buffers_ = ring->make_table(kRegisterBuffers2, kBuffers);
  out = std::move(ring);
  return {};
}

Ring::~Ring() {
  if (rings_ != nullptr) munmap(rings_, rings_bytes_);
  if (entries_ != nullptr) munmap(entries_, entries_bytes_);
}

Status Ring::map(const Params& params) {
  sqe_shift_ = (params.flags & kSetupSqe128) != 0 ? 1 : 0;
  cqe_shift_ = (params.flags & kSetupCqe32) != 0 ? 1 : 0;
  size_t sq_bytes = params.sq.array + params.sq_entries * sizeof(uint32_t);
  size_t cq_bytes = params.cq.cqes + (params.cq_entries << cqe_shift_) * sizeof(Cqe);
  rings_bytes_ = std::max(sq_bytes, cq_bytes);
  entries_bytes_ = (params.sq_entries << sqe_shift_) * sizeof(Sqe);
  auto map_at = [&](uint64_t offset, size_t bytes) -> void* {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(),
                    static_cast<off_t>(offset));
    if (at == MAP_FAILED) return nullptr;
    madvise(at, bytes, MADV_DONTFORK);  // a forked child has no part in it
    return at;
  };
  rings_ = map_at(kOffsetSqRing, rings_bytes_);
  entries_ = map_at(kOffsetSqes, entries_bytes_);
  if (rings_ == nullptr || entries_ == nullptr)
    return system_failure(MC_UNSUPPORTED, "cannot map an io_uring; raise the limit of lockable memory",
                          errno);
  auto* base = static_cast<std::byte*>(rings_);
  auto word = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(base + offset); };
  sq_head_ = word(params.sq.head);
  sq_tail_ = word(params.sq.tail);
  sq_flags_ = word(params.sq.flags);
  sq_array_ = word(params.sq.array);
  sq_mask_ = *word(params.sq.ring_mask);
  cq_head_ = word(params.cq.head);
  cq_tail_ = word(params.cq.tail);
  cq_mask_ = *word(params.cq.ring_mask);
  cqes_ = reinterpret_cast<const Cqe*>(base + params.cq.cqes);
  for (uint32_t i = 0; i <= sq_mask_; ++i) sq_array_[i] = i;
  tail_ = *sq_tail_;
  return {};
}

void Ring::probe() {
  auto found = std::make_unique<Probe>();
  std::memset(found.get(), 0, sizeof *found);
  if (register_with(fd_.get(), kRegisterProbe, found.get(), 256) < 0) return;
  for (size_t i = 0; i < found->count; ++i) {
    if ((found->ops[i].flags & 1u) != 0) supported_.set(found->ops[i].op);
  }
}

bool Ring::make_table(uint32_t what, uint32_t count) {
  ResourceTable table{};
  table.count = count;
  table.flags = kResourcesSparse;
  return register_with(fd_.get(), what, &table, sizeof table) == 0;
}

bool Ring::update(uint32_t what, uint32_t slot, const void* data) {
  ResourceUpdate change{};
  change.offset = slot;
  change.data = reinterpret_cast<uint64_t>(data);
  change.count = 1;
  return register_with(fd_.get(), what, &change, sizeof change) == 1;
}

int Ring::enter(uint32_t to_submit, uint32_t flags) {
  return static_cast<int>(syscall(SYS_io_uring_enter, fd_.get(), to_submit, 0, flags, nullptr, 0));
}

Sqe* Ring::next() {
  if (unsubmitted() > sq_mask_) return nullptr;
  auto* sqe = static_cast<Sqe*>(entries_) + ((tail_ & sq_mask_) << sqe_shift_);
  std::memset(sqe, 0, sizeof(Sqe) << sqe_shift_);
  ++tail_;
  return sqe;
}

void Ring::submit() {
  __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
  while (uint32_t waiting = unsubmitted()) {
    int taken = enter(waiting, 0);
    if (taken < 0 && errno == EINTR) continue;
    if (taken <= 0) return;  // EAGAIN, EBUSY: once completions were taken it will go on
  }
}

bool Ring::take(Cqe& cqe) {
  uint32_t head = __atomic_load_n(cq_head_, __ATOMIC_RELAXED);
  if (head == cq_tail()) return false;
  cqe = cqes_[(head & cq_mask_) << cqe_shift_];
  __atomic_store_n(cq_head_, head + 1, __ATOMIC_RELEASE);
  return true;
}

template <size_t Count>
int Ring::Slots<Count>::take() {
  for (size_t i = 0; i < used.size(); ++i) {
    size_t word = (hint + i) % used.size();
    if (~used[word] == 0) continue;
    size_t bit = static_cast<size_t>(std::countr_one(used[word]));
    used[word] |= uint64_t{1} << bit;
    hint = word;
    return static_cast<int>(word * 64 + bit);
  }
  return -1;
}

template <size_t Count>
void Ring::Slots<Count>::give_back(int slot) {
  used[static_cast<size_t>(slot) / 64] &= ~(uint64_t{1} << (slot % 64));
}

int Ring::add_file(int fd) {
  int slot = has_files_ ? files_.take() : -1;
  int32_t entry = fd;
  if (slot < 0 || update(kRegisterFilesUpdate2, static_cast<uint32_t>(slot), &entry)) return slot;
  files_.give_back(slot);
  return -1;
}

void Ring::remove_file(int slot) {
  int32_t none = -1;
  if (update(kRegisterFilesUpdate2, static_cast<uint32_t>(slot), &none)) files_.give_back(slot);
}

int Ring::add_buffer(const void* address, size_t length) {
  int slot = has_buffers_ ? buffers_.take() : -1;
  iovec entry{const_cast<void*>(address), length};
  if (slot < 0 || update(kRegisterBuffersUpdate, static_cast<uint32_t>(slot), &entry)) return slot;
  buffers_.give_back(slot);
  return -1;
}

void Ring::remove_buffer(int slot) {
  iovec none{nullptr, 0};
  if (update(kRegisterBuffersUpdate, static_cast<uint32_t>(slot), &none)) buffers_.give_back(slot);
}

}  // namespace mooncake::nvmeof
