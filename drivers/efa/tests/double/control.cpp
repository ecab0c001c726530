// What tests steer the double with, and ask it.
#include "double.hpp"

using namespace fabric_double;

extern "C" __attribute__((visibility("default"))) void double_seed(uint64_t seed) {
  std::lock_guard lock(Network::get().mutex);
  Network::get().random.seed(seed);
}
extern "C" __attribute__((visibility("default"))) void double_pace_us(uint64_t pace) {
  std::lock_guard lock(Network::get().mutex);
  Network::get().pace = std::chrono::microseconds(pace);
}
// While nothing is under way.
extern "C" __attribute__((visibility("default"))) void double_finish_at_once(int at_once) {
  Network::get().at_once = at_once != 0;
}
extern "C" __attribute__((visibility("default"))) uint64_t double_doorbells() {
  return Network::get().doorbells;
}
extern "C" __attribute__((visibility("default"))) uint64_t double_posted() { return Network::get().posted; }
