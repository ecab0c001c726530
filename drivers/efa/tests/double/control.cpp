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

// Before an engine starts: which fabrics there are, of Offer.
extern "C" __attribute__((visibility("default"))) void double_offer(int offers) {
  Network::get().offers = offers;
}
extern "C" __attribute__((visibility("default"))) const char* double_opened() {
  return Network::get().opened.c_str();
}
// Memory that is of a GPU from now on, or with -1 no longer.
extern "C" __attribute__((visibility("default"))) void double_gpu(uint64_t begin, uint64_t length,
                                                                  int device) {
  std::lock_guard lock(Network::get().mutex);
  Network::get().gpus.erase(begin);
  if (device >= 0) Network::get().gpus[begin] = {begin + length, device};
}
extern "C" __attribute__((visibility("default"))) uint64_t double_gpu_registrations() {
  std::lock_guard lock(Network::get().mutex);
  return Network::get().gpu_registrations;
}
