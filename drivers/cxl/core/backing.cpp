#include "backing.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <vector>

#include "layout.hpp"

#ifndef MAP_SYNC
#define MAP_SYNC 0x80000
#endif
#ifndef MAP_SHARED_VALIDATE
#define MAP_SHARED_VALIDATE 0x03
#endif

namespace mooncake::cxl {
namespace {

constexpr double kLockWaitS = 10.0;
constexpr long kLockRestNs = 500'000;
constexpr int kBindPolicy = 2;  // MPOL_BIND, <linux/mempolicy.h>

// A number in a file of sysfs, decimal or with 0x; 0 where there is none.
uint64_t read_number(const std::string& path) {
  std::ifstream file(path);
  std::string text;
  return file >> text ? std::strtoull(text.c_str(), nullptr, 0) : 0;
}

std::string link_name(const std::string& path) {
  char target[256];
  ssize_t length = readlink(path.c_str(), target, sizeof target);
  std::string text(target, length > 0 ? static_cast<size_t>(length) : 0);
  return text.substr(text.rfind('/') + 1);
}

// The page of a file on hugetlbfs, in bytes; 0 for files elsewhere.
uint64_t huge_page_of(int fd) {
  struct statfs system{};
  bool huge = fstatfs(fd, &system) == 0 && static_cast<uint32_t>(system.f_type) == HUGETLBFS_MAGIC;
  return huge ? static_cast<uint64_t>(system.f_bsize) : 0;
}

}  // namespace

Backing::~Backing() {
  if (data_ != nullptr) munmap(data_, size_);
}

Status Backing::open(const Request& request) {
  path_ = request.path;
  int flags = O_RDWR | O_CLOEXEC | (request.create ? O_CREAT : 0);
  fd_.reset(::open(path_.c_str(), flags, 0660));
  if (!fd_.valid()) return system_failure(MC_UNSUPPORTED, "cannot open the pool " + path_, errno);
  struct stat file{};
  if (fstat(fd_.get(), &file) != 0) return system_failure(MC_IO, "cannot stat " + path_, errno);
  if (S_ISCHR(file.st_mode)) return look_at_device(file.st_rdev);
  if (!S_ISREG(file.st_mode)) {
    return failed(MC_INVALID, path_ +
                                  " is neither a file nor a character device; a block device needs a "
                                  "file system with dax on it, or a devdax namespace");
  }
  identity_ = "file " + std::to_string(file.st_dev) + " " + std::to_string(file.st_ino);
  huge_page_ = huge_page_of(fd_.get());
  return look_at_file(request, static_cast<uint64_t>(file.st_size));
}

Status Backing::look_at_device(dev_t number) {
  std::string folder = "/sys/dev/char/" + std::to_string(major(number)) + ":" + std::to_string(minor(number));
  if (link_name(folder + "/subsystem") != "dax") {
    return failed(MC_INVALID, path_ + " is no dax device, as " + folder + "/subsystem tells");
  }
  device_ = true;
  identity_ = "device " + std::to_string(number);
  size_ = read_number(folder + "/size");
  if (size_ == 0) return failed(MC_UNSUPPORTED, folder + "/size does not tell how large " + path_ + " is");
  // The whole of it is mapped from 0, so its alignment (2 MiB, or 1 GiB) is kept where the size is a
  // multiple.
  uint64_t align = read_number(folder + "/align");
  if (align > 0 && size_ % align != 0)
    return failed(MC_UNSUPPORTED,
                  path_ + ": its size is no multiple of its alignment, " + std::to_string(align));
  return {};
}

Status Backing::look_at_file(const Request& request, uint64_t size) {
  if (size == 0 && request.create && request.size_bytes > 0) {
    if (huge_page_ != 0 && request.size_bytes % huge_page_ != 0) {
      return failed(MC_INVALID, path_ + " is on hugetlbfs, and size_bytes, " +
                                    std::to_string(request.size_bytes) + ", is no multiple of its page, " +
                                    std::to_string(huge_page_));
    }
    if (LockedBacking locked(*this); !locked.lock().ok()) return failed(MC_TIMEOUT, path_ + " stays locked");
    if (ftruncate(fd_.get(), static_cast<off_t>(request.size_bytes)) != 0) {
      return system_failure(
          MC_NO_MEMORY, "cannot give " + path_ + " " + std::to_string(request.size_bytes) + " bytes", errno);
    }
    made_here_ = true;
    size = request.size_bytes;
  }
  size_ = size;
  if (size_ == 0)
    return failed(MC_INVALID, path_ + " is empty; size_bytes and create say how large to make it");
  return {};
}

Status Backing::map(const Request& request) {
  if (device_ && request.numa_node >= 0)
    return failed(MC_INVALID, "numa_node cannot be chosen for a dax device; it is what its memory is on");
  int protection = PROT_READ | PROT_WRITE;
  // On a file system with dax, this makes data durable once it is flushed; elsewhere it is refused.
  void* base = mmap(nullptr, size_, protection, MAP_SHARED_VALIDATE | MAP_SYNC, fd_.get(), 0);
  if (base == MAP_FAILED) base = mmap(nullptr, size_, protection, MAP_SHARED, fd_.get(), 0);
  if (base == MAP_FAILED)
    return no_memory(errno, "cannot map the " + std::to_string(size_) + " bytes of " + path_);
  data_ = static_cast<std::byte*>(base);
  if (!device_) madvise(base, size_, MADV_HUGEPAGE);  // advice: no kernel has to take it
  if (request.numa_node >= 0) {
    if (Status status = bind(request.numa_node); !status.ok()) return status;
  }
  return made_here_ ? back_with_pages() : Status{};
}

// Now, and on the node it is bound to: a page that is missing later would kill the process that touches it.
Status Backing::back_with_pages() {
  int error = posix_fallocate(fd_.get(), 0, static_cast<off_t>(size_));
  if (error == 0 || error == EOPNOTSUPP || error == EINVAL) return {};  // not every file system can
  return no_memory(error, "cannot give " + path_ + " its " + std::to_string(size_) + " bytes");
}

// With the remedy where it is huge pages that are missing.
Status Backing::no_memory(int error, std::string what) const {
  if (huge_page_ == 0) return system_failure(MC_NO_MEMORY, what, error);
  std::string folder = "/sys/kernel/mm/hugepages/hugepages-" + std::to_string(huge_page_ >> 10) + "kB/";
  what += " (" + std::to_string(size_ / huge_page_) + " huge pages of which " +
          std::to_string(read_number(folder + "free_hugepages")) + " are free; write more to " + folder +
          "nr_hugepages, or remove the file and make a smaller one)";
  return system_failure(MC_NO_MEMORY, what, error);
}

// For files on tmpfs and hugetlbfs the policy belongs to the file, so it holds for every process.
Status Backing::bind(int numa_node) {
  std::vector<unsigned long> nodes(static_cast<size_t>(numa_node) / (8 * sizeof(long)) + 1);
  nodes.back() = 1ul << (static_cast<size_t>(numa_node) % (8 * sizeof(long)));
  constexpr unsigned kMove = 2;  // MPOL_MF_MOVE: pages that fallocate() put elsewhere
  if (syscall(SYS_mbind, data_, size_, kBindPolicy, nodes.data(), nodes.size() * 8 * sizeof(long) + 1,
              kMove) == 0)
    return {};
  return system_failure(MC_UNSUPPORTED, "cannot bind " + path_ + " to NUMA node " + std::to_string(numa_node),
                        errno);
}

Status Backing::lock(uint64_t deadline_ns) {
  auto held = [&] {
    return failed(MC_TIMEOUT, "another process or thread holds the lock of " + path_ +
                                  " (flock); is one stopped in a debugger?");
  };
  uint64_t now = now_ns();
  if (!mutex_.try_lock_for(std::chrono::nanoseconds(deadline_ns > now ? deadline_ns - now : 0)))
    return held();
  while (flock(fd_.get(), LOCK_EX | LOCK_NB) != 0) {
    bool busy = errno == EWOULDBLOCK || errno == EINTR;
    if (busy && now_ns() < deadline_ns) {
      timespec rest{0, kLockRestNs};
      nanosleep(&rest, nullptr);
      continue;
    }
    Status status = busy ? held() : system_failure(MC_IO, "cannot lock " + path_, errno);
    mutex_.unlock();
    return status;
  }
  return {};
}

void Backing::unlock() {
  flock(fd_.get(), LOCK_UN);
  mutex_.unlock();
}

Status LockedBacking::lock() {
  Status status = backing_.lock(deadline_after(kLockWaitS));
  held_ = status.ok();
  return status;
}

}  // namespace mooncake::cxl
