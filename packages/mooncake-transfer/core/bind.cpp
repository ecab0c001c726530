#include "bind.hpp"

namespace nb = nanobind;

namespace mooncake {

namespace {

const char* exception_name(Code code) {
  switch (code) {
    case Code::kInvalid:
      return "ConfigError";
    case Code::kUnsupported:
      return "DriverUnavailable";
    case Code::kNoMemory:
      return "MemoryUnavailable";
    case Code::kUnreachable:
      return "PeerUnreachable";
    case Code::kUntrusted:
      return "PeerUntrusted";
    case Code::kRefused:
      return "RegionRefused";
    case Code::kCancelled:
      return "TransferCancelled";
    case Code::kTimeout:
      return "TransferTimeout";
    case Code::kMemoryInUse:
      return "MemoryInUse";
    case Code::kClosed:
      return "EngineClosed";
    case Code::kForked:
      return "EngineForked";
    case Code::kRegionBusy:
      return "RegionBusy";
    case Code::kRegionClosed:
      return "RegionClosed";
    case Code::kNoRoute:
      return "NoRoute";
    case Code::kIntegrity:
      return "IntegrityError";
    case Code::kNoAnswer:
      return "CallTimeout";
    default:
      return "TransferError";
  }
}

}  // namespace

bool has_signal() {
  GilHeld acquire;
  return PyErr_Occurred() != nullptr || PyErr_CheckSignals() != 0;
}

Interruptible::Interruptible() { interrupted = &has_signal; }

Interruptible::~Interruptible() { interrupted = nullptr; }

void require_origin(const Origin& origin) {
  if (!origin.forked()) return;
  raise(Status::error(Code::kForked,
                      "this engine belongs to the parent process; make a new one in this process"));
}

double seconds_of(nb::handle value, const char* name) {
  double seconds = PyFloat_AsDouble(value.ptr());
  bool mistyped = PyErr_Occurred() != nullptr;
  if (!mistyped && seconds >= 0) return seconds;
  PyErr_Clear();
  raise(Status::error(Code::kInvalid, std::string(name) + " is " + nb::repr(value).c_str() +
                                          "; it must be a number of seconds, 0 or more"));
}

void raise(const Status& status) {
  nb::object type = nb::module_::import_("mooncake_transfer._errors").attr(exception_name(status.code));
  PyErr_SetString(type.ptr(), status.reason.c_str());
  throw nb::python_error();
}

}  // namespace mooncake

NB_MODULE(_core, m) {
  m.doc() =
      "Compiled core of mooncake_transfer: engine and channel. Import it through mooncake_transfer.engine.";
  // A process that ends with an engine open or after a fork leaks by design; that is nothing to report.
  nb::set_leak_warnings(false);
  mooncake::bind_channel(m);
  mooncake::bind_engine(m);
  mooncake::bind_transfer(m);
  mooncake::bind_python_driver(m);
  mooncake::bind_calls(m);
}
