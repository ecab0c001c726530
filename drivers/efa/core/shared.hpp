// What both sides of an endpoint stand on: its lock, the fabric, links, and operations with their
// completions.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fabric.hpp"
#include "link.hpp"
#include "options.hpp"
#include "support/completions.hpp"
#include "wire.hpp"

namespace mooncake::efa {

struct Connection;
struct Remote;
struct Epoch;

struct Operation {
  enum class State : uint8_t { kFree, kWaiting, kPosted };

  Operation* next = nullptr;  // in the queue or free list that it is in
  Connection* connection = nullptr;
  Remote* remote = nullptr;
  Epoch* epoch = nullptr;      // a write's
  void* descriptor = nullptr;  // of the local memory
  uint64_t local_address = 0;
  uint64_t remote_offset = 0;
  uint64_t length = 0;
  uint64_t cookie = 0;
  mc_opcode opcode = MC_READ;
  State state = State::kFree;
  bool cancelled = false;
};

// First in, first out; of operations that are in no other.
class OperationQueue {
 public:
  bool empty() const { return first_ == nullptr; }
  Operation* front() const { return first_; }
  void push(Operation* operation) {
    operation->next = nullptr;
    (first_ == nullptr ? first_ : last_->next) = operation;
    last_ = operation;
  }
  void push_front(Operation* operation) {
    operation->next = first_;
    if (first_ == nullptr) last_ = operation;
    first_ = operation;
  }
  Operation* pop() {
    Operation* operation = first_;
    first_ = operation->next;
    return operation;
  }
  void append(OperationQueue& other) {
    while (!other.empty()) push(other.pop());
  }
  // Takes out those that `condition` holds for.
  template <class Condition>
  OperationQueue take_if(Condition&& condition) {
    OperationQueue taken, kept;
    while (!empty()) {
      Operation* operation = pop();
      (condition(*operation) ? taken : kept).push(operation);
    }
    *this = kept;
    return taken;
  }

 private:
  Operation* first_ = nullptr;
  Operation* last_ = nullptr;
};

// The messages of a session in the order in which they were sent, however they came.
class Sequencer {
 public:
  uint64_t next_to_send() { return ++sent_; }
  // Calls `handle` for `message` and those that waited for it. False for one that cannot be: the session
  // ends.
  template <class Handle>
  bool accept(const Message& message, Handle&& handle) {
    constexpr size_t kMostEarly = 4096;
    if (message.sequence <= received_) return false;
    if (message.sequence > received_ + 1)
      return early_.size() < kMostEarly && early_.emplace(message.sequence, message).second;
    ++received_;
    if (!handle(message)) return true;  // the session is over; this object may be, too
    while (!early_.empty() && early_.begin()->first == received_ + 1) {
      Message next = early_.extract(early_.begin()).mapped();
      ++received_;
      if (!handle(next)) return true;
    }
    return true;
  }

 private:
  uint64_t sent_ = 0;
  uint64_t received_ = 0;
  std::map<uint64_t, Message> early_;
};

// The links of one side. Each session gets one of its own up to a limit, then they are shared.
class Links {
 public:
  Links(Fabric& fabric, size_t limit, bool incoming) : fabric_(fabric), limit_(limit), incoming_(incoming) {}

  Status take(Link*& link);
  // One session less. An unused link stays for a while: it may have to answer, and providers do not like it
  // when an endpoint goes whose messages were not read yet. `at_once`: both sides know of the end.
  void release(Link& link, bool at_once);
  // Closes what is due; what is broken is for the owner to close, as operations are on it.
  void tick(uint64_t now);
  // Closes it now.
  void close(Link& link);
  void close_all();
  const std::vector<std::unique_ptr<Link>>& open() const { return open_; }
  // Whether there is one that stays only for a while.
  bool lingering() const {
    return std::any_of(open_.begin(), open_.end(), [](const auto& link) { return link->closes_ns != 0; });
  }
  bool stalled() const {
    return std::any_of(open_.begin(), open_.end(), [](const auto& link) { return link->stalled(); });
  }
  bool sending() const {
    return std::any_of(open_.begin(), open_.end(), [](const auto& link) { return link->sending(); });
  }

 private:
  Fabric& fabric_;
  const size_t limit_;
  const bool incoming_;
  std::vector<std::unique_ptr<Link>> open_;
  std::vector<std::unique_ptr<Link>> closed_;  // completions of theirs may come yet
};

class Shared {
 public:
  explicit Shared(const Options& options)
      : options(options), completions(options.queue_depth), operations_(options.queue_depth) {
    for (Operation& operation : operations_) {
      operation.next = free_;
      free_ = &operation;
    }
    finished_.reserve(options.queue_depth);
  }

  // What was finished since the last time, to the engine. With the lock held.
  void hand_out() {
    if (finished_.empty()) return;
    completions.push(finished_);
    finished_.clear();
  }

  Operation* new_operation() {
    Operation* operation = free_;
    free_ = operation->next;
    ++used_;
    return operation;
  }
  // Its completion goes out with the next hand_out().
  void finish(Operation& operation, const Status* failure) {
    driver::Completion& completion = finished_.emplace_back();
    completion.cookie = operation.cookie;
    completion.opcode = operation.opcode;
    if (failure == nullptr)
      completion.bytes = operation.length;
    else
      completion.fail(*failure);
    operation.state = Operation::State::kFree;
    operation.cancelled = false;
    operation.next = free_;
    free_ = &operation;
    --used_;
  }
  // A notice's, that its room was reserved for.
  void finish_notice(uint64_t cookie, const Status* failure) {
    driver::Completion& completion = finished_.emplace_back();
    completion.cookie = cookie;
    completion.opcode = MC_WRITE;
    if (failure != nullptr) completion.fail(*failure);
  }
  // For what names nothing that there is.
  void refuse(const mc_op& op, const Status& failure) {
    driver::Completion& completion = finished_.emplace_back();
    completion.cookie = op.cookie;
    completion.opcode = static_cast<mc_opcode>(op.opcode);
    completion.fail(failure);
  }
  size_t operations_under_way() const { return used_; }
  std::vector<Operation>& operations() { return operations_; }

  const Options options;
  // Guards the fabric's endpoints and queue, and everything of both sides.
  std::mutex mutex;
  Fabric fabric;
  driver::Completions completions;

 private:
  std::vector<Operation> operations_;
  Operation* free_ = nullptr;
  size_t used_ = 0;
  std::vector<driver::Completion> finished_;
};

}  // namespace mooncake::efa
