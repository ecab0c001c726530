// The drivers that run under sanitizers, linked in with no Python in between.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "mooncake_driver.h"

namespace sanitized {

enum class MemoryType { kMain, kCuda, kCudaManaged, kNpu };

struct Driver {
  const mc_driver_v1* table = nullptr;
  std::vector<std::pair<std::string, std::string>> options;
  MemoryType memory = MemoryType::kMain;
};

// A driver by name, ready to be opened: tcp, shm, verbs, nvlink, ascend, template, fake. Over devices of a
// double and their memory: nvlink-gpu, nvlink-managed, ascend-npu. `device` is a name that is free.
Driver find_driver(const std::string& name, const std::string& device);
MemoryType memory_of(const std::string& name);

}  // namespace sanitized
