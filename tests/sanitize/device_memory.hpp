// Memory of the devices that doubles of vendors' libraries have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "drivers.hpp"

namespace sanitized {

struct DeviceMemory {
  uint64_t address = 0;   // as the device knows it
  char* bytes = nullptr;  // where this program sees it
  std::function<void()> free;
};

// Of device 0. Fails the program when the double refuses.
DeviceMemory allocate_on_device(MemoryType type, size_t size);

// Fails the program when a rule was broken that the vendor's library does not check.
void check_rules_of_doubles();

}  // namespace sanitized
