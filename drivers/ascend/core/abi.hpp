// The driver's function table.
#pragma once

#include "mooncake_driver.h"

namespace mooncake::ascend {

// Constant; lives as long as the process.
const mc_driver_v1* driver_table();

}  // namespace mooncake::ascend
