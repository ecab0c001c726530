// Threads for work that blocks, started when there is more of it than there are idle ones.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "os.hpp"

namespace mooncake::driver {

// Thread-safe. An Item is linked by its member `Item* next`, so that handing one over takes no memory.
template <class Item>
class Workers {
 public:
  // What each thread does: it take()s until that gives null. `most` threads; `name` is theirs.
  using Body = std::function<void(Workers&)>;
  Workers(const char* name, size_t most, Body body) : name_(name), most_(most), body_(std::move(body)) {}
  ~Workers() { stop(); }

  // MC_NO_MEMORY: there is no thread, and the system gives none. Then the item was not taken, and is the
  // caller's to end; where one is there already, that does all of it.
  Status add(Item& item) {
    {
      std::lock_guard lock(mutex_);
      item.next = nullptr;
      if (queued_ + 1 > idle_ && threads_.size() < most_) {
        if (Status status = start_thread(); !status.ok() && threads_.empty()) return status;
      }
      (first_ == nullptr ? first_ : last_->next) = &item;
      last_ = &item;
      ++queued_;
    }
    woken_.notify_one();
    return {};
  }

  // For the threads: the next item; null when stop() was called and nothing is left.
  Item* take() {
    std::unique_lock lock(mutex_);
    ++idle_;
    woken_.wait(lock, [&] { return first_ != nullptr || stopping_; });
    --idle_;
    return pop();
  }
  // The next one if it fits, without waiting; else null.
  template <class Fits>
  Item* take_if(Fits&& fits) {
    std::lock_guard lock(mutex_);
    return first_ != nullptr && fits(*first_) ? pop() : nullptr;
  }

  // Waits for what was added and joins every thread.
  void stop() {
    std::vector<std::thread> threads;
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
      threads.swap(threads_);
    }
    woken_.notify_all();
    for (std::thread& thread : threads) thread.join();
  }

 private:
  // With the mutex held, as pop().
  Status start_thread() {
    std::string why;
    try {
      threads_.emplace_back([this] {
        prepare_thread(name_);
        body_(*this);
      });
      return {};
    } catch (const std::system_error& error) {
      why = error.what();
    } catch (const std::bad_alloc& error) {
      why = error.what();
    }
    return failed(MC_NO_MEMORY, "no thread can be had for it (" + why +
                                    "); raise the limit of processes (ulimit -u) or of the container");
  }
  Item* pop() {
    Item* item = first_;
    if (item == nullptr) return nullptr;
    first_ = item->next;
    --queued_;
    return item;
  }

  const char* const name_;
  const size_t most_;
  const Body body_;
  std::mutex mutex_;
  std::condition_variable woken_;
  Item *first_ = nullptr, *last_ = nullptr;
  size_t queued_ = 0, idle_ = 0;
  bool stopping_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace mooncake::driver
