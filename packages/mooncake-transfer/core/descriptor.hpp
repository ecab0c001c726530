// A socket with one owner, closed in forked children too.
#pragma once

#include <utility>

namespace mooncake {

// A child made by fork() without exec would keep copies of our sockets: peers would not see this process die
// while the child lives, and its port would stay taken. So every Descriptor is closed in such a child, which
// cannot use the channel anyway: it has no threads.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd);
  ~Descriptor() { reset(); }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), depth_(other.depth_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
      depth_ = other.depth_;
    }
    return *this;
  }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  void reset();

 private:
  int fd_ = -1;
  unsigned depth_ = 0;  // how many forks lie between the loading of this module and this process
};

}  // namespace mooncake
