// A file descriptor with one owner, closed in forked children too.
#pragma once

#include <utility>

namespace mooncake_tcp {

// A child made by fork() without exec would keep copies of our sockets, and peers would not see this process
// die while the child lives. So every Descriptor is closed in such a child, which cannot use the endpoint
// anyway: it has no threads.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
};

}  // namespace mooncake_tcp
