#include "abi.hpp"

#include "endpoint.hpp"
#include "support/table.hpp"

namespace mooncake::cxl {

// No late_writes and no fence: threads of the initiator copy, and a completion is out once the last of them
// has left its operation.
const mc_driver_v1* driver_table() { return driver::Table<Endpoint>::make("cxl"); }

}  // namespace mooncake::cxl
