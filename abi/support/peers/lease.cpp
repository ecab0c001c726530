#include "lease.hpp"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>

namespace mooncake::driver {
namespace {

constexpr uint64_t kOneToken = 1ull << 32;
constexpr size_t kPageBytes = LeasePage::kSlots * sizeof(LeaseSlot);
// A dead copier wakes nobody, so a waiter looks up now and then.
constexpr uint64_t kLookUpNs = 20'000'000;

// The count is the low half of the word. Only little-endian machines have it in the first four bytes.
static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__);
uint32_t* count_address(const std::atomic<uint64_t>& word) {
  return reinterpret_cast<uint32_t*>(const_cast<std::atomic<uint64_t>*>(&word));
}

}  // namespace

void LeaseSlot::wake_owner() {
  // The owner may be waiting for us. Not a private futex: it may be another process.
  syscall(SYS_futex, count_address(word_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void LeaseSlot::revoke() { word_.fetch_add(kOneToken, std::memory_order_acq_rel); }

bool LeaseSlot::wait_idle(uint64_t deadline_ns, const std::atomic<bool>& holder_gone) const {
  for (;;) {
    uint32_t count = static_cast<uint32_t>(word_.load(std::memory_order_acquire));
    if (count == 0 || holder_gone.load(std::memory_order_acquire)) return true;
    uint64_t now = now_ns();
    if (now >= deadline_ns) return false;
    uint64_t wait = std::min(deadline_ns - now, kLookUpNs);
    timespec timeout{static_cast<time_t>(wait / 1'000'000'000), static_cast<long>(wait % 1'000'000'000)};
    syscall(SYS_futex, count_address(word_), FUTEX_WAIT, count, &timeout, nullptr, 0);
  }
}

Status LeasePage::create(std::shared_ptr<LeasePage>& page, UniqueFd& fd) {
  UniqueFd made(memfd_create("mooncake-lease", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.valid()) return system_failure(MC_NO_MEMORY, "cannot create a memfd for leases", errno);
  if (ftruncate(made.get(), kPageBytes) != 0 ||
      fcntl(made.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return system_failure(MC_NO_MEMORY, "cannot size and seal the memfd for leases", errno);
  }
  if (Status status = map(made.get(), page); !status.ok()) return status;
  fd = std::move(made);
  return {};
}

Status LeasePage::open(int fd, std::shared_ptr<LeasePage>& page) {
  struct stat file{};
  if (fstat(fd, &file) != 0 || static_cast<size_t>(file.st_size) < kPageBytes ||
      !sealed_against_shrinking(fd)) {
    return failed(MC_UNREACHABLE, "the peer passed a lease page that is too small or not sealed");
  }
  return map(fd, page);
}

Status LeasePage::map(int fd, std::shared_ptr<LeasePage>& page) {
  void* base = mmap(nullptr, kPageBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return system_failure(MC_NO_MEMORY, "cannot map the lease page", errno);
  // A forked child takes no part in the driver.
  madvise(base, kPageBytes, MADV_DONTFORK);
  page.reset(new LeasePage(static_cast<LeaseSlot*>(base)));
  return {};
}

LeasePage::~LeasePage() { munmap(slots_, kPageBytes); }

}  // namespace mooncake::driver
