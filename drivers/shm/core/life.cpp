#include "life.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

#include "mapping.hpp"

#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

namespace mooncake::shm {
namespace {

constexpr size_t kBytes = 4096;

}  // namespace

Status LifeSign::create(std::shared_ptr<LifeSign>& sign, std::shared_ptr<const UniqueFd>& fd) {
  UniqueFd made(memfd_create("mooncake-shm-life", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!made.valid()) return system_failure(MC_NO_MEMORY, "cannot create a memfd for the sign of life", errno);
  if (ftruncate(made.get(), kBytes) != 0)
    return system_failure(MC_NO_MEMORY, "cannot size the memfd for the sign of life", errno);
  if (Status status = map(made.get(), PROT_READ | PROT_WRITE, sign); !status.ok()) return status;
  // One peer must not be able to tell the others that this endpoint has gone. Linux before 5.1 lacks the
  // seal.
  fcntl(made.get(), F_ADD_SEALS, F_SEAL_FUTURE_WRITE);
  if (fcntl(made.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    return system_failure(MC_NO_MEMORY, "cannot seal the memfd for the sign of life", errno);
  fd = std::make_shared<const UniqueFd>(std::move(made));
  return {};
}

void LifeSign::hold() {
  head_.list.next = &entry_;
  head_.list_op_pending = nullptr;
  head_.futex_offset = reinterpret_cast<char*>(word_) - reinterpret_cast<char*>(&entry_);
  entry_.next = &head_.list;
  // It takes the place of the C library's list, which is empty: this thread locks no robust mutex.
  if (syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) return;
  word_->store(static_cast<uint32_t>(syscall(SYS_gettid)), std::memory_order_release);
}

void LifeSign::resign() { word_->store(FUTEX_OWNER_DIED, std::memory_order_release); }

Status LifeSign::open(int fd, std::shared_ptr<LifeSign>& sign) {
  struct stat file{};
  if (fstat(fd, &file) != 0 || static_cast<size_t>(file.st_size) < kBytes || !sealed_against_shrinking(fd))
    return failed(MC_UNREACHABLE, "the peer passed a sign of life that is too small or not sealed");
  return map(fd, PROT_READ, sign);
}

Status LifeSign::map(int fd, int protection, std::shared_ptr<LifeSign>& sign) {
  void* base = mmap(nullptr, kBytes, protection, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) return system_failure(MC_NO_MEMORY, "cannot map the sign of life", errno);
  madvise(base, kBytes, MADV_DONTFORK);
  sign.reset(new LifeSign(static_cast<std::atomic<uint32_t>*>(base)));
  return {};
}

LifeSign::~LifeSign() { munmap(word_, kBytes); }

}  // namespace mooncake::shm
