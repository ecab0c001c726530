#include "abi.hpp"

#include "endpoint.hpp"
#include "support/table.hpp"

namespace mooncake::efa {

const mc_driver_v1* driver_table() { return driver::Table<Endpoint>::make("efa"); }

}  // namespace mooncake::efa
