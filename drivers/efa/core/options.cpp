#include "options.hpp"

#include "support/options.hpp"

namespace mooncake::efa {

Status parse_options(const mc_option* given, size_t count, Options& options) {
  driver::OptionReader reader("efa", given, count);
  reader.text("provider", &options.provider);
  reader.text("domain", &options.domain);
  reader.text("library", &options.library);
  reader.number<uint64_t>("queue_depth", &options.queue_depth, 1, 1 << 20);
  reader.number<uint32_t>("endpoints", &options.endpoints, 1, 4096);
  reader.number<uint32_t>("spin_us", &options.spin_us, 0, 1'000'000);
  reader.number<double>("connect_timeout_s", &options.connect_timeout_s, 0.01, 3600);
  reader.number<double>("dead_peer_timeout_s", &options.dead_peer_timeout_s, 0.1, 3600);
  return reader.finish();
}

}  // namespace mooncake::efa
