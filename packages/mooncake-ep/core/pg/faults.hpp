// Faults on purpose, at named points of an operation. Nothing happens unless a plan was set.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace mooncake::ep::pg {

enum class Point : uint32_t {
  kNone,
  kBeforePublish,  // the input is in shared memory, the word still says otherwise
  kAfterPublish,   // this rank contributed, and has read nothing
  kWhileReading,   // it has read some of what the others published
  kBeforeResult,   // its share of a two-step reduction is computed, but not published
  kBeforeReturn,   // all is done but the return
  kBeforeJoin,     // activated by the others, not there yet
};

enum class Action : uint32_t { kKill, kStop };

class FaultPlan {
 public:
  // At the `nth` time (from 1) that this process comes to `point` from now on.
  void set(Point point, uint64_t nth, Action action) {
    action_ = action;
    left_ = nth;
    point_.store(point);
  }
  void clear() { point_.store(Point::kNone); }
  void at(Point point) {
    if (point_.load(std::memory_order_relaxed) == point) [[unlikely]]
      strike();
  }

 private:
  void strike();

  std::atomic<Point> point_{Point::kNone};
  std::atomic<uint64_t> left_{0};
  std::atomic<Action> action_{Action::kKill};
};

}  // namespace mooncake::ep::pg
