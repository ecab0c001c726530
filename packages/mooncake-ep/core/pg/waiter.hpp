// Waiting for words that other processes change: spin, then yield, then sleep; never for ever.
#pragma once

#include <sched.h>

#include <cstddef>

#include "control.hpp"
#include "result.hpp"
#include "support/os.hpp"

namespace mooncake::ep::pg {

// Called now and then by a wait, on its thread; true: end the wait (a signal has to be handled).
using Interrupted = bool (*)();

class Waiter {
 public:
  // `spins`: how long to look before giving the core away; few where ranks outnumber cores.
  Waiter(const Control& control, int rank, uint32_t spins, Interrupted interrupted)
      : control_(control), rank_(rank), spins_(spins), interrupted_(interrupted) {}

  // Gives way a little, more with every call. True when it is time to look whether peers live.
  // `ready`: what is waited for, looked at once more between announcing a sleep and sleeping.
  template <typename Ready>
  bool pause(Ready&& ready) {
    if (looks_ < spins_) {
      ++looks_;
      driver::relax();
      return false;
    }
    if (yields_ < kYields) {
      ++yields_;
      sched_yield();
      return false;
    }
    auto& bell = control_.header().bell;
    announce(true);
    uint32_t heard = bell.load();
    if (!ready()) sleep(heard);
    announce(false);
    check_interrupted();
    return true;
  }

  static void ring(const Control& control);

 private:
  static constexpr uint32_t kYields = 50;

  void announce(bool sleeping);
  void sleep(uint32_t heard);
  void check_interrupted();

  const Control& control_;
  int rank_;
  uint32_t spins_;
  Interrupted interrupted_;
  uint32_t looks_ = 0, yields_ = 0;
  uint32_t sleeps_ = 0;
};

// The looks that pay on this machine with so many ranks.
uint32_t spins_for(size_t ranks);

// Wakes everybody of the group who sleeps; cheap when nobody does.
inline void ring_sleepers(const Control& control, size_t words) {
  for (size_t word = 0; word < words; ++word) {
    if (control.header().sleeping[word].load() != 0) {
      Waiter::ring(control);
      return;
    }
  }
}

}  // namespace mooncake::ep::pg
