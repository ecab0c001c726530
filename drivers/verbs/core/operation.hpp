// Operations under way, in memory that is taken once.
#pragma once

#include <cstdint>
#include <vector>

#include "mooncake_driver.h"
#include "queue_pair.hpp"
#include "region.hpp"

namespace mooncake::verbs {

struct Remote;

struct Operation {
  uint64_t cookie;
  uint64_t length;  // its own
  uint64_t total;   // with those that were merged into it, which follow it on both sides
  uint64_t posted;  // of `total`, from the front
  uint64_t local_offset, remote_offset;
  Connection* connection;
  Region* region;
  Remote* remote;
  uint32_t link;       // the next of a queue, or of the free ones
  uint32_t merged;     // the next one merged into the first
  uint32_t in_flight;  // slices posted and not completed
  uint32_t slice;      // bytes
  uint32_t epoch;      // how many notices were accepted before it
  uint8_t opcode;      // mc_opcode, or kNotice
  bool busy;           // accepted and not finished, and not merged into another
  bool cancelled;
  bool unposted;  // counted by its connection as not all with the device
  bool lost;      // slices of it were posted to a queue pair that broke
};

// All slots of one endpoint. Not thread-safe.
class Operations {
 public:
  explicit Operations(size_t count) : slots_(count) {
    for (size_t i = 0; i < count; ++i) slots_[i].link = i + 1 < count ? static_cast<uint32_t>(i + 1) : kNone;
    free_ = count > 0 ? 0 : kNone;
  }
  // There is one: no more are accepted than there are slots.
  uint32_t take() {
    uint32_t index = free_;
    free_ = slots_[index].link;
    return index;
  }
  void give_back(uint32_t index) {
    slots_[index].busy = false;
    slots_[index].link = free_;
    free_ = index;
  }
  Operation& operator[](uint32_t index) { return slots_[index]; }
  size_t size() const { return slots_.size(); }

 private:
  std::vector<Operation> slots_;
  uint32_t free_ = kNone;
};

// First in, first out, through the links of the slots.
class Queue {
 public:
  bool empty() const { return head_ == kNone; }
  uint32_t front() const { return head_; }
  void push(Operations& all, uint32_t index) {
    all[index].link = kNone;
    (head_ == kNone ? head_ : all[tail_].link) = index;
    tail_ = index;
  }
  uint32_t pop(Operations& all) {
    uint32_t index = head_;
    head_ = all[index].link;
    return index;
  }
  void put_first(Operations& all, uint32_t index) {
    all[index].link = head_;
    if (head_ == kNone) tail_ = index;
    head_ = index;
  }
  // Takes out those that `wanted` holds for, and hands each to `each`.
  template <class Wanted, class Each>
  void extract(Operations& all, Wanted&& wanted, Each&& each) {
    Queue kept;
    while (!empty()) {
      uint32_t index = pop(all);
      if (wanted(all[index])) {
        each(index);
      } else {
        kept.push(all, index);
      }
    }
    *this = kept;
  }

 private:
  uint32_t head_ = kNone, tail_ = kNone;
};

}  // namespace mooncake::verbs
