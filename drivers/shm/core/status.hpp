// What went wrong, as a code for the engine and a sentence for people.
#pragma once

#include <string>
#include <utility>

#include "mooncake_driver.h"

namespace mooncake::shm {

struct [[nodiscard]] Status {
  mc_status code = MC_OK;
  std::string reason;

  bool ok() const { return code == MC_OK; }
};

inline Status failed(mc_status code, std::string reason) { return {code, std::move(reason)}; }

// "<what>: <text of the error number>"
Status system_failure(mc_status code, const std::string& what, int error);

}  // namespace mooncake::shm
