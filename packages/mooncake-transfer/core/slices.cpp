#include "slices.hpp"

#include <new>
#include <utility>

namespace mooncake {

SliceTable::~SliceTable() {
  for (auto& slab : slabs_) delete[] slab.load(std::memory_order_relaxed);
}

void SliceTable::grow() {
  size_t slab = slab_of(size_);
  if (slab >= kSlabs) throw std::bad_alloc();  // more than 4 thousand million operations are in flight
  uint32_t count = kFirst << slab;
  auto* slices = new Slice[count];
  for (uint32_t i = count; i > 0; --i) {
    slices[i - 1].index = size_ + i - 1;
    slices[i - 1].next = free_;
    free_ = &slices[i - 1];
  }
  size_ += count;
  slabs_[slab].store(slices, std::memory_order_release);
}

Slice& SliceTable::take() {
  if (free_ == nullptr) grow();
  Slice& slice = *std::exchange(free_, free_->next);
  slice.attempts = 0;
  slice.tried = 0;
  slice.not_before_ns = 0;
  slice.notice = false;
  return slice;
}

void SliceTable::give_back(Slice& slice) {
  withdraw(slice);
  slice.transfer = nullptr;
  slice.with_driver = false;
  slice.next = free_;
  free_ = &slice;
}

void SliceTable::issue(Slice& slice, size_t endpoint) {
  slice.endpoint = static_cast<uint32_t>(endpoint);
  // Above the index, never 0: 4 thousand million submissions pass before a slice repeats a cookie.
  if (++slice.submission == 0) ++slice.submission;
  slice.op.cookie = uint64_t{slice.submission} << 32 | slice.index;
  slice.ticket.store(slice.op.cookie, std::memory_order_release);
}

Slice* SliceTable::redeem(uint64_t cookie, size_t endpoint) const {
  auto index = static_cast<uint32_t>(cookie);
  size_t slab = slab_of(index);
  Slice* slices = slab < kSlabs ? slabs_[slab].load(std::memory_order_acquire) : nullptr;
  if (slices == nullptr) return nullptr;
  Slice& slice = slices[index - begin_of(slab)];
  if (slice.ticket.load(std::memory_order_acquire) != cookie || cookie >> 32 == 0) return nullptr;
  if (slice.endpoint != endpoint) return nullptr;
  slice.ticket.store(0, std::memory_order_relaxed);
  return &slice;
}

}  // namespace mooncake
