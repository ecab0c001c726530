#include "os.hpp"

#include <sys/syscall.h>
#include <unistd.h>

namespace mooncake::shm {

UniqueFd open_pidfd(pid_t pid) {
  if (pid <= 0) return {};
  return UniqueFd(static_cast<int>(syscall(SYS_pidfd_open, pid, 0)));
}

}  // namespace mooncake::shm
