// A queue that keeps its memory: what comes and goes all the time must not allocate.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

namespace mooncake_tcp {

// T is default-constructible and movable; an element that was taken out is left default-constructed.
template <typename T>
class Ring {
 public:
  bool empty() const { return size_ == 0; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  const T& operator[](size_t i) const { return slots_[(head_ + i) & (slots_.size() - 1)]; }
  T& front() { return (*this)[0]; }
  const T& front() const { return (*this)[0]; }

  void push_back(T value) {
    if (size_ == slots_.size()) grow();
    (*this)[size_++] = std::move(value);
  }
  void pop_front() {
    front() = T();
    head_ = (head_ + 1) & (slots_.size() - 1);
    --size_;
  }
  // Moves what comes after it.
  void erase(size_t i) {
    for (; i + 1 < size_; ++i) (*this)[i] = std::move((*this)[i + 1]);
    (*this)[--size_] = T();
  }
  template <typename Predicate>
  void erase_if(Predicate&& predicate) {
    size_t kept = 0;
    for (size_t i = 0; i < size_; ++i) {
      if (predicate((*this)[i])) continue;
      if (kept != i) (*this)[kept] = std::move((*this)[i]);
      ++kept;
    }
    while (size_ > kept) (*this)[--size_] = T();
  }
  void clear() { *this = Ring(); }
  void swap(Ring& other) {
    slots_.swap(other.slots_);
    std::swap(head_, other.head_);
    std::swap(size_, other.size_);
  }

 private:
  void grow() {
    std::vector<T> larger(slots_.empty() ? 16 : slots_.size() * 2);
    for (size_t i = 0; i < size_; ++i) larger[i] = std::move((*this)[i]);
    slots_.swap(larger);
    head_ = 0;
  }

  std::vector<T> slots_;  // a power of two in number
  size_t head_ = 0;
  size_t size_ = 0;
};

}  // namespace mooncake_tcp
