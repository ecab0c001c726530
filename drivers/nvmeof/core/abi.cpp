#include "abi.hpp"

#include "endpoint.hpp"
#include "support/table.hpp"

namespace mooncake::nvmeof {

// No late_writes and no fence: the kernel of this host does the I/O of files and devices, and a completion is
// out once the kernel has said that it is done.
const mc_driver_v1* driver_table() { return driver::Table<Endpoint>::make("nvmeof"); }

}  // namespace mooncake::nvmeof
