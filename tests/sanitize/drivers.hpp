// The drivers that run under sanitizers, linked in with no Python in between.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "mooncake_driver.h"

namespace sanitized {

struct Driver {
  const mc_driver_v1* table = nullptr;
  std::vector<std::pair<std::string, std::string>> options;
};

// A driver by name, ready to be opened: tcp, shm, verbs, template, fake. `device` is a name that is free.
Driver find_driver(const std::string& name, const std::string& device);

}  // namespace sanitized
