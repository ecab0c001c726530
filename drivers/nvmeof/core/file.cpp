#include "file.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <thread>

namespace mooncake::nvmeof {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kNameLength = 80;  // reasons have 200 bytes, and the end of a path says most
constexpr double kLockLimitS = 30;
// linux/fs.h and linux/stat.h, which older build machines lack in part.
constexpr unsigned long kBlockBytes64 = 0x80081272;  // BLKGETSIZE64
constexpr unsigned long kLogicalBlock = 0x1268;      // BLKSSZGET
constexpr unsigned long kNamespaceId = 0x4e40;       // NVME_IOCTL_ID
constexpr unsigned kStatxDioAlign = 0x00002000;

// struct statx, as far as what is asked for.
struct StatxHead {
  uint32_t mask, block_bytes;
  uint64_t attributes;
  uint32_t links, uid, gid;
  uint16_t mode, spare0;
  uint64_t inode, size, blocks, attributes_mask;
  uint64_t times[8];
  uint32_t device[4];
  uint64_t mount;
  uint32_t dio_mem_align, dio_offset_align;
  uint64_t spare[12];
};
static_assert(sizeof(StatxHead) == 256);

std::string name_of(int fd) {
  char path[4096];
  std::string link = "/proc/self/fd/" + std::to_string(fd);
  ssize_t length = readlink(link.c_str(), path, sizeof path);
  if (length <= 0) return "descriptor " + std::to_string(fd);
  std::string name(path, static_cast<size_t>(length));
  return name.size() <= kNameLength ? name : "..." + name.substr(name.size() - kNameLength);
}

}  // namespace

Status File::open(int fd, uint64_t bytes, const Options& options, std::shared_ptr<File>& out) {
  auto file = std::make_shared<File>();
  struct stat status{};
  if (fd < 0 || fstat(fd, &status) != 0)
    return system_failure(MC_INVALID, "descriptor " + std::to_string(fd) + " cannot be used", errno);
  file->name_ = name_of(fd);
  bool block_device = S_ISBLK(status.st_mode);
  uint64_t size = static_cast<uint64_t>(status.st_size);
  if (!block_device && !S_ISREG(status.st_mode))
    return failed(MC_INVALID, file->name_ + " is no file and no block device");
  if (block_device && ioctl(fd, kBlockBytes64, &size) != 0)
    return system_failure(MC_INVALID, "cannot ask " + file->name_ + " for its size", errno);
  if (size < bytes) {
    return failed(MC_INVALID, file->name_ + " has " + std::to_string(size) + " bytes, " +
                                  std::to_string(bytes) + " are needed");
  }
  file->writable_ = (fcntl(fd, F_GETFL) & O_ACCMODE) != O_RDONLY;
  file->buffered_.reset(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!file->buffered_.valid()) return system_failure(MC_IO, "cannot keep " + file->name_ + " open", errno);
  if (options.direct) file->open_direct(block_device, size);
  if (options.passthrough && block_device && file->direct_.valid())
    file->open_commands(static_cast<unsigned>(status.st_rdev));
  out = std::move(file);
  return {};
}

// An own description of the file: its flags and locks are not those of whoever registered it.
void File::open_direct(bool block_device, uint64_t size) {
  std::string link = "/proc/self/fd/" + std::to_string(buffered_.get());
  int flags = (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC | O_DIRECT;
  direct_.reset(::open(link.c_str(), flags));
  if (!direct_.valid()) return;
  find_alignment(block_device);
  if (granule_ == 0 || (granule_ & (granule_ - 1)) != 0) {  // it opens so, but does not do it
    direct_.reset();
    granule_ = memory_align_ = 1;
    return;
  }
  // Stacked devices claim to take any memory and hand it down to ones that do not: brd below the loop
  // transport of nvmet mixes the bytes of pieces that are no whole sectors.
  memory_align_ = std::max<uint64_t>(memory_align_, 512);
  // The last incomplete block of a file goes through the page cache. Nothing else of the same page may go
  // past it at the same time, or the kernel would write the page back over it.
  if (!block_device) granule_ = std::max(granule_, kPage);
  direct_limit_ = size / granule_ * granule_;
}

// Beside /dev/nvme0n1 there is /dev/ng0n1, for who may open it. A partition has none: its blocks are counted
// from its own beginning.
void File::open_commands(unsigned device) {
  std::string place = "/sys/dev/block/" + std::to_string(major(device)) + ":" + std::to_string(minor(device));
  char target[4096];
  ssize_t length = readlink(place.c_str(), target, sizeof target);
  if (length <= 0) return;
  std::string name(target, static_cast<size_t>(length));
  name.erase(0, name.rfind('/') + 1);
  if (name.compare(0, 4, "nvme") != 0 || name.find('p') != std::string::npos) return;
  std::ifstream limit(place + "/queue/max_hw_sectors_kb");
  uint64_t kib = 0;
  std::string character = "/dev/ng" + name.substr(4);
  UniqueFd fd(::open(character.c_str(), (writable_ ? O_RDWR : O_RDONLY) | O_CLOEXEC));
  int number = fd.valid() ? ioctl(fd.get(), kNamespaceId) : -1;
  if (!(limit >> kib) || number <= 0) return;
  commands_ = std::move(fd);
  nsid_ = static_cast<uint32_t>(number);
  most_in_command_ = kib << 10;
}

Status File::identity(Identity& found) const {
  struct stat status{};
  if (fstat(buffered_.get(), &status) != 0 || !S_ISBLK(status.st_mode))
    return failed(MC_UNSUPPORTED, name_ + " is a file of its host, which no other host reaches");
  std::string number = std::to_string(major(status.st_rdev)) + ":" + std::to_string(minor(status.st_rdev));
  Status known = read_identity("/sys/dev/block/" + number, found);
  return known.ok() ? known : failed(known.code, name_ + ": " + known.reason);
}

void File::find_alignment(bool block_device) {
  StatxHead found{};
  if (syscall(SYS_statx, direct_.get(), "", 0x1000 /* AT_EMPTY_PATH */, kStatxDioAlign, &found) == 0 &&
      (found.mask & kStatxDioAlign) != 0) {
    granule_ = found.dio_offset_align;
    memory_align_ = std::max<uint64_t>(found.dio_mem_align, 1);
    return;
  }
  int sector = 0;
  bool known = block_device && ioctl(direct_.get(), kLogicalBlock, &sector) == 0 && sector > 0;
  granule_ = memory_align_ = known ? static_cast<uint64_t>(sector) : kPage;
}

Status File::run(mc_opcode opcode, std::byte* memory, uint64_t offset, uint64_t length, bool durable) {
  bool past_cache = direct_.valid() && offset + length <= direct_limit_;
  int fd = past_cache ? direct_.get() : buffered_.get();
  uint64_t done = 0;
  while (done < length) {
    iovec part{memory + done, length - done};
    off_t at = static_cast<off_t>(offset + done);
    ssize_t moved =
        opcode == MC_READ ? preadv(fd, &part, 1, at) : pwritev2(fd, &part, 1, at, durable ? kRwfDsync : 0);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0)
      return failure(opcode, offset + done, length - done, std::generic_category().message(errno));
    if (moved == 0) return failure(opcode, offset + done, length - done, "the file ends before the region");
    done += static_cast<uint64_t>(moved);
  }
  return {};
}

Status File::lock(uint64_t block) {
  locks_.lock(block);
  struct flock range{};
  range.l_type = F_WRLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(block);
  range.l_len = static_cast<off_t>(granule_);
  uint64_t deadline = deadline_after(kLockLimitS);
  auto pause = std::chrono::microseconds(50);
  while (fcntl(direct_fd(), F_OFD_SETLK, &range) != 0 && (errno == EAGAIN || errno == EACCES)) {
    if (now_ns() > deadline) {
      locks_.unlock(block);
      return failure(MC_WRITE, block, granule_, "another process has kept this block locked for 30 s");
    }
    // The lock is held for one read and one write of the holder, and nothing tells when it is free.
    std::this_thread::sleep_for(pause);
    pause = std::min(2 * pause, std::chrono::microseconds(5000));
  }
  return {};  // file systems without locks: between the threads of this process, at least
}

void File::unlock(uint64_t block) {
  struct flock range{};
  range.l_type = F_UNLCK;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(block);
  range.l_len = static_cast<off_t>(granule_);
  fcntl(direct_fd(), F_OFD_SETLK, &range);
  locks_.unlock(block);
}

}  // namespace mooncake::nvmeof
