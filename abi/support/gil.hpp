// For bindings: code without the interpreter's lock, and with it. In place of nanobind's guards and calls,
// for what they do when the interpreter ends while a daemon thread is in them.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace mooncake {

// A thread that asks for the lock while the interpreter finalises never gets it. From Python 3.14 on it stays
// where it is until the process ends. Earlier ones call pthread_exit(), which unwinds the thread: through
// destructors, which are noexcept, and handlers of any exception, so the process ends by std::terminate().
// Here the thread stays, too, before anything of it is unwound. `body` has nothing to destroy that needs the
// lock.
template <typename Body>
auto stay_when_python_ends(Body&& body) {
  try {
    return body();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// A scope without the lock; also for nb::call_guard.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() {
    stay_when_python_ends([this] { PyEval_RestoreThread(state_); });
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

// A scope with the lock, on any thread. What runs Python code in it does so by call_python.
class GilHeld {
 public:
  GilHeld() : state_(stay_when_python_ends([] { return PyGILState_Ensure(); })) {}
  ~GilHeld() { PyGILState_Release(state_); }
  GilHeld(const GilHeld&) = delete;
  GilHeld& operator=(const GilHeld&) = delete;

 private:
  PyGILState_STATE state_;
};

// Calls what is written in Python, which may lend the lock to other threads. With the lock held; throws
// python_error.
inline nanobind::object call_python(nanobind::handle callable, const nanobind::tuple& arguments) {
  auto call = [&] { return PyObject_CallObject(callable.ptr(), arguments.ptr()); };
  PyObject* result = stay_when_python_ends(call);
  if (result == nullptr) throw nanobind::python_error();
  return nanobind::steal(result);
}

}  // namespace mooncake
