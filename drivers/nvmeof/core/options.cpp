#include "options.hpp"

#include "support/options.hpp"

namespace mooncake::nvmeof {

Status parse_options(const mc_option* given, size_t count, Options& options) {
  driver::OptionReader reader("nvmeof", given, count);
  reader.text("io", &options.io);
  reader.flag("direct", &options.direct);
  reader.flag("durable", &options.durable);
  reader.flag("polled", &options.polled);
  reader.flag("register_buffers", &options.register_buffers);
  reader.number<uint64_t>("in_flight", &options.in_flight, 1, 1 << 15);
  reader.number<uint64_t>("chunk_bytes", &options.chunk_bytes, 4096, 1 << 30);
  reader.number<uint32_t>("workers", &options.workers, 1, 256);
  reader.number<uint64_t>("queue_depth", &options.queue_depth, 1, 1 << 15);
  Status status = reader.finish();
  if (status.ok() && options.io != "auto" && options.io != "io_uring" && options.io != "threads") {
    return failed(MC_INVALID,
                  "nvmeof driver: option io is '" + options.io + "'; it must be auto, io_uring or threads");
  }
  return status;
}

}  // namespace mooncake::nvmeof
