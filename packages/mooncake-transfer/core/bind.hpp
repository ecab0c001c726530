// What the binding files share: turning a Status into an exception, and waiting without the GIL.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "forks.hpp"
#include "interrupt.hpp"
#include "status.hpp"
#include "support/gil.hpp"

namespace mooncake {

// Raises the exception of mooncake_transfer._errors for the status. The GIL is held.
[[noreturn]] void raise(const Status& status);

inline void check(const Status& status) {
  if (!status.ok()) raise(status);
}

// Raises EngineForked in a forked child of the process that made the object.
void require_origin(const Origin& origin);

// A Python argument in seconds; raises ConfigError for what is none, for nan and for negative ones.
double seconds_of(nanobind::handle value, const char* name);

// Whether an exception is set, after a look for signals; takes the GIL.
bool has_signal();

// Lets go of the GIL, and has the waits of the core ask for Ctrl-C. Whoever made it calls
// throw_if_interrupted() afterwards.
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;

 private:
  GilReleased release_;
};

inline void throw_if_interrupted() {
  if (PyErr_Occurred() != nullptr) throw nanobind::python_error();
}

// Calls `wait(deadline)` without the GIL until it returns true or the deadline passes; lets Ctrl-C through.
template <typename Wait>
bool wait_interruptibly(double timeout_s, Wait&& wait) {
  constexpr uint64_t kSliceNs = 100'000'000;
  uint64_t deadline = deadline_after(timeout_s);
  for (;;) {
    bool done;
    {
      GilReleased release;
      uint64_t slice = now_ns() + kSliceNs;
      done = wait(slice < deadline ? slice : deadline);
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nanobind::python_error();
    if (now_ns() >= deadline) return false;
  }
}

inline std::string to_string(const nanobind::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
inline nanobind::bytes to_bytes(const std::string& string) {
  return nanobind::bytes(string.data(), string.size());
}

void bind_engine(nanobind::module_& m);
void bind_transfer(nanobind::module_& m);
void bind_channel(nanobind::module_& m);
void bind_calls(nanobind::module_& m);
void bind_python_driver(nanobind::module_& m);

}  // namespace mooncake
