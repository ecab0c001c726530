// Starts the threads of an engine, which the system may refuse.
#pragma once

#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "status.hpp"

namespace mooncake {

template <class Body>
Status start_thread(std::thread* thread, const char* what, Body&& body) {
  try {
    *thread = std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    return Status::error(Code::kIo, std::string("cannot start the thread of ") + what + ": " +
                                        error.code().message() +
                                        "; raise `ulimit -u`, or pids.max of the control group");
  }
  return {};
}

}  // namespace mooncake
