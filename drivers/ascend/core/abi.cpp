#include "abi.hpp"

#include "endpoint.hpp"
#include "support/table.hpp"

namespace mooncake::ascend {

// No late_writes and no fence: a transfer that fails is completed only once HIXL has ended its link
// (Disconnect has succeeded, or Finalize), on which nothing arrives any more then.
const mc_driver_v1* driver_table() { return driver::Table<Endpoint>::make("ascend"); }

}  // namespace mooncake::ascend
