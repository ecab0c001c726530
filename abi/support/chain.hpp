// Queues and spares of objects that are used again, for paths on which nothing may be allocated.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

namespace mooncake::driver {

// First in, first out, of objects with a member `std::unique_ptr<Item> next`. Not thread-safe.
template <class Item>
class Chain {
 public:
  Chain() = default;
  ~Chain() {
    while (pop()) {
    }
  }
  Chain(Chain&& other) noexcept
      : first_(std::move(other.first_)), last_(std::exchange(other.last_, nullptr)) {}
  Chain& operator=(Chain&&) = delete;

  bool empty() const { return first_ == nullptr; }
  // The next one is `next` of it.
  Item* first() const { return first_.get(); }
  void push(std::unique_ptr<Item> item) {
    Item* added = item.get();
    (last_ == nullptr ? first_ : last_->next) = std::move(item);
    last_ = added;
  }
  std::unique_ptr<Item> pop() {
    std::unique_ptr<Item> taken = std::move(first_);
    if (taken) first_ = std::move(taken->next);
    if (!first_) last_ = nullptr;
    return taken;
  }

 private:
  std::unique_ptr<Item> first_;
  Item* last_ = nullptr;
};

// Objects that are made once and used again; Item::clear() keeps what they have allocated. Thread-safe.
template <class Item>
class Spares {
 public:
  std::unique_ptr<Item> take() {
    std::unique_ptr<Item> taken;
    {
      std::lock_guard lock(mutex_);
      taken = kept_.pop();
      if (taken) --count_;
    }
    return taken ? std::move(taken) : std::make_unique<Item>();
  }
  void give(std::unique_ptr<Item> item) {
    item->clear();
    std::lock_guard lock(mutex_);
    if (count_ == kMost) return;
    ++count_;
    kept_.push(std::move(item));
  }

 private:
  static constexpr size_t kMost = 1024;

  std::mutex mutex_;
  Chain<Item> kept_;
  size_t count_ = 0;
};

}  // namespace mooncake::driver
