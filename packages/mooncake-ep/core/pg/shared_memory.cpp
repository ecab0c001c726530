#include "shared_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace mooncake::ep::pg {

void fail_with_errno(const std::string& what) {
  int code = errno;
  throw std::runtime_error(what + ": " + std::strerror(code));
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      nbytes_(std::exchange(other.nbytes_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, nbytes_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    nbytes_ = std::exchange(other.nbytes_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, nbytes_);
}

SharedMemory SharedMemory::map(driver::UniqueFd fd, size_t nbytes) {
  void* data = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd.get(), 0);
  if (data == MAP_FAILED) fail_with_errno("cannot map " + std::to_string(nbytes) + " bytes of shared memory");
  madvise(data, nbytes, MADV_DONTDUMP);
  SharedMemory memory;
  memory.fd_ = std::move(fd);
  memory.data_ = static_cast<uint8_t*>(data);
  memory.nbytes_ = nbytes;
  return memory;
}

SharedMemory SharedMemory::create(const char* name, size_t nbytes) {
  driver::UniqueFd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) fail_with_errno("cannot create shared memory");
  if (ftruncate(fd.get(), static_cast<off_t>(nbytes)) != 0) {
    fail_with_errno("cannot make shared memory of " + std::to_string(nbytes) + " bytes (ulimit -f?)");
  }
  // A peer that cut the file short would end every other process by SIGBUS.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    fail_with_errno("cannot seal shared memory");
  return map(std::move(fd), nbytes);
}

SharedMemory SharedMemory::open(int pid, int fd) {
  std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  driver::UniqueFd mine(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  if (!mine.valid()) {
    fail_with_errno("cannot open the shared memory of process " + std::to_string(pid) + " at " + path +
                    " (ranks must be of one user, host and PID namespace)");
  }
  struct stat state{};
  if (fstat(mine.get(), &state) != 0) fail_with_errno("cannot look at " + path);
  if (!driver::sealed_against_shrinking(mine.get())) {
    throw std::runtime_error(path + " is not memory of a process group: it is not sealed");
  }
  return map(std::move(mine), static_cast<size_t>(state.st_size));
}

void SharedMemory::release(size_t offset, size_t nbytes) const {
  madvise(data_ + offset, nbytes, MADV_REMOVE);
}

}  // namespace mooncake::ep::pg
