// nvme-tcp://HOST:PORT/NQN?nsid=1&block=4096&most=131072
#pragma once

#include <cstdint>
#include <string>

#include "os.hpp"

namespace mooncake::nvmeof::nvme {

struct Url {
  std::string host, port = "4420", nqn;
  uint32_t nsid = 1;
  uint32_t block_bytes = 0;  // 0: not told
  uint32_t most_bytes = 0;   // of one command; 0: not told

  static constexpr const char* kScheme = "nvme-tcp://";
};

// MC_INVALID names what is wrong.
Status parse_url(const std::string& text, Url& url);

}  // namespace mooncake::nvmeof::nvme
