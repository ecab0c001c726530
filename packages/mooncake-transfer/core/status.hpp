// Results inside the core. Exceptions exist only in the bindings.
#pragma once

#include <cstdint>
#include <ctime>
#include <string>
#include <utility>

#include "mooncake_driver.h"

namespace mooncake {

// What can go wrong, in the vocabulary of mooncake_transfer._errors. The binding maps each to one exception.
enum class Code {
  kOk,
  kInvalid,
  kUnsupported,
  kNoMemory,
  kUnreachable,
  kUntrusted,
  kRefused,
  kCancelled,
  kTimeout,
  kIo,
  kClosed,
  kForked,
  kRegionBusy,
  kRegionClosed,
  kNoRoute,
  kIntegrity,
  kNoAnswer,     // of a peer whose connection stands
  kMemoryInUse,  // a transfer's time is over, and a driver does not let go of its memory
};

struct Status {
  Code code = Code::kOk;
  std::string reason;

  bool ok() const { return code == Code::kOk; }
  static Status error(Code code, std::string reason) { return {code, std::move(reason)}; }
};

inline Code code_of(int32_t status) {
  switch (status) {
    case MC_OK:
      return Code::kOk;
    case MC_INVALID:
      return Code::kInvalid;
    case MC_UNSUPPORTED:
      return Code::kUnsupported;
    case MC_NO_MEMORY:
      return Code::kNoMemory;
    case MC_UNREACHABLE:
      return Code::kUnreachable;
    case MC_REFUSED:
      return Code::kRefused;
    case MC_CANCELLED:
      return Code::kCancelled;
    case MC_TIMEOUT:
      return Code::kTimeout;
    case MC_CLOSED:
      return Code::kClosed;
    default:
      return Code::kIo;
  }
}

// CLOCK_MONOTONIC in nanoseconds, as the driver ABI counts deadlines.
inline uint64_t now_ns() {
  timespec ts{};
  clock_gettime(CLOCK_MONOTONIC, &ts);
  return static_cast<uint64_t>(ts.tv_sec) * 1'000'000'000ull + static_cast<uint64_t>(ts.tv_nsec);
}

inline uint64_t deadline_after(double seconds) {
  constexpr double kForever = 1e9;  // 30 years: keeps the sum far from overflow
  double bounded = seconds < 0 ? 0 : seconds > kForever ? kForever : seconds;
  return now_ns() + static_cast<uint64_t>(bounded * 1e9);
}

}  // namespace mooncake
