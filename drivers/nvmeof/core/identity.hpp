// By what two hosts know that they have the same NVMe namespace.
#pragma once

#include <string>

#include "os.hpp"

namespace mooncake::nvmeof {

// As sysfs writes them; empty where the namespace has none.
struct Identity {
  std::string nqn, nsid, uuid, nguid, eui;

  std::string text() const;  // a line for each
  static Identity parse(const std::string& text);
};

// Of the block device whose folder in sysfs this is. MC_UNSUPPORTED for one that is no whole NVMe namespace.
Status read_identity(const std::string& folder, Identity& identity);
// Looks below `folder` (/sys/block) for the namespace: by UUID, NGUID or EUI-64 where both have one, which a
// reused number cannot deceive, else by the subsystem's NQN and the number. MC_UNREACHABLE tells what is
// missing.
Status find_namespace(const std::string& folder, const Identity& wanted, std::string& name);

}  // namespace mooncake::nvmeof
