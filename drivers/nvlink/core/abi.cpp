#include "abi.hpp"

#include "endpoint.hpp"
#include "support/table.hpp"

namespace mooncake::nvlink {

// No late_writes and no fence: the initiator's GPU copies, and a completion is out once its event was
// reached. Of what is staged, the owner copies only pieces that were not taken back before the completion.
const mc_driver_v1* driver_table() { return driver::Table<Endpoint>::make("nvlink"); }

}  // namespace mooncake::nvlink
