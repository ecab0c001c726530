// How these programs fail, and the clock they use.
#pragma once

#include <cstdint>
#include <string>

namespace sanitized {

// Says what is wrong and ends the program with an error.
[[noreturn]] void fail(const std::string& what);
inline void require(bool holds, const std::string& what) {
  if (!holds) fail(what);
}

uint64_t now_ns();
inline uint64_t seconds_from_now(double seconds) { return now_ns() + static_cast<uint64_t>(seconds * 1e9); }

}  // namespace sanitized
