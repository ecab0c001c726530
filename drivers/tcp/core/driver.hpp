// The driver's C function table.
#pragma once

#include "mooncake_driver.h"

namespace mooncake_tcp {

const mc_driver_v1* driver_table();

}  // namespace mooncake_tcp
