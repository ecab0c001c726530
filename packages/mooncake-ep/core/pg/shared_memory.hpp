// Memory that processes of one host share: an anonymous file, so nothing is left behind whoever dies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "support/os.hpp"

namespace mooncake::ep::pg {

class SharedMemory {
 public:
  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  // A new file of `nbytes`, sparse: pages exist from their first touch. Throws std::runtime_error.
  static SharedMemory create(const char* name, size_t nbytes);
  // The file that process `pid` holds open as `fd`. Throws std::runtime_error, also when it is gone.
  static SharedMemory open(int pid, int fd);

  uint8_t* data() const { return data_; }
  size_t nbytes() const { return nbytes_; }
  int fd() const { return fd_.get(); }
  bool mapped() const { return data_ != nullptr; }
  // Gives the pages of a range back; it reads as zeros afterwards.
  void release(size_t offset, size_t nbytes) const;

 private:
  static SharedMemory map(driver::UniqueFd fd, size_t nbytes);

  driver::UniqueFd fd_;
  uint8_t* data_ = nullptr;
  size_t nbytes_ = 0;
};

[[noreturn]] void fail_with_errno(const std::string& what);

}  // namespace mooncake::ep::pg
