// The function table of the fake driver.
#pragma once

#include <memory>
#include <string>

#include "fabric.hpp"

namespace mooncake::fake {

// A table for a driver of this name; lives as long as the process. All of them do the same.
const mc_driver_v1* driver_table(const std::string& name);

// Makes a fabric that endpoints find by the number in their option `fabric`, as long as it lives.
std::shared_ptr<Fabric> make_fabric(uint64_t seed, bool manual_clock, uint64_t* number);

}  // namespace mooncake::fake
