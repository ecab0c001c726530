#include "failing.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace sanitized {

void fail(const std::string& what) {
  std::fprintf(stderr, "FAILED: %s\n", what.c_str());
  std::fflush(stderr);
  std::_Exit(1);  // threads of drivers still run: no destructors under their feet
}

uint64_t now_ns() {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

}  // namespace sanitized
