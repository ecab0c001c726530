#include "abi.hpp"

#include "endpoint.hpp"
#include "support/table.hpp"

namespace template_driver {

const mc_driver_v1* driver_table() { return mooncake::driver::Table<Endpoint>::make("template"); }

}  // namespace template_driver
