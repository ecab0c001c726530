#include "options.hpp"

#include "support/options.hpp"

namespace mooncake::nvlink {

driver::Status parse_options(const mc_option* given, size_t count, Options& options) {
  driver::OptionReader reader("nvlink", given, count);
  reader.text("library", &options.library);
  reader.number<uint32_t>("streams", &options.streams, 1, 32);
  reader.number<uint64_t>("queue_depth", &options.queue_depth, 1, 1 << 20);
  reader.number<uint64_t>("in_flight_bytes", &options.in_flight_bytes, 1 << 20, 1ull << 40);
  reader.number<double>("answer_timeout_s", &options.answer_timeout_s, 0.01, 3600);
  reader.flag("allow_other_users", &options.allow_other_users);
  reader.flag("main_memory", &options.main_memory);
  reader.text("host", &options.host);
  reader.text("fabric", &options.fabric);
  if (driver::Status status = reader.finish(); !status.ok()) return status;
  if (options.fabric == "auto" || options.fabric == "on" || options.fabric == "off") return {};
  return driver::failed(MC_INVALID,
                        "nvlink driver: option fabric: '" + options.fabric + "' is none of auto, on and off");
}

}  // namespace mooncake::nvlink
