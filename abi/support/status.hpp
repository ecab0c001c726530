// What went wrong inside a driver, as a code for the engine and a sentence for people.
#pragma once

#include <string>
#include <system_error>
#include <utility>

#include "mooncake_driver.h"

namespace mooncake::driver {

struct [[nodiscard]] Status {
  mc_status code = MC_OK;
  std::string reason;

  bool ok() const { return code == MC_OK; }
};

inline Status failed(mc_status code, std::string reason) { return {code, std::move(reason)}; }

// "<what>: <text of the error number>"
inline Status system_failure(mc_status code, const std::string& what, int error) {
  return failed(code, what + ": " + std::generic_category().message(error));
}

}  // namespace mooncake::driver
