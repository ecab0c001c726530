#include "options.hpp"

#include "support/options.hpp"

namespace mooncake::nvmeof {

Status parse_options(const mc_option* given, size_t count, Options& options) {
  driver::OptionReader reader("nvmeof", given, count);
  reader.text("io", &options.io);
  reader.flag("direct", &options.direct);
  reader.flag("durable", &options.durable);
  reader.flag("polled", &options.polled);
  reader.flag("passthrough", &options.passthrough);
  reader.flag("gpudirect", &options.gpudirect);
  reader.flag("register_buffers", &options.register_buffers);
  reader.number<uint64_t>("in_flight", &options.in_flight, 1, 1 << 15);
  reader.number<uint64_t>("chunk_bytes", &options.chunk_bytes, 4096, 1 << 30);
  reader.number<uint32_t>("workers", &options.workers, 1, 256);
  reader.number<uint64_t>("queue_depth", &options.queue_depth, 1, 1 << 15);
  reader.text("host", &options.host);
  reader.text("host_nqn", &options.nvme.host_nqn);
  reader.flag("header_digest", &options.nvme.header_digest);
  reader.flag("data_digest", &options.nvme.data_digest);
  reader.number<uint32_t>("io_queues", &options.nvme.io_queues, 1, 64);
  reader.number<uint32_t>("queue_entries", &options.nvme.queue_entries, 2, 1024);
  reader.number<double>("connect_timeout_s", &options.nvme.connect_timeout_s, 0.01, 3600);
  reader.number<double>("command_timeout_s", &options.nvme.command_timeout_s, 0.01, 3600);
  reader.number<double>("keep_alive_s", &options.nvme.keep_alive_s, 0, 3600);
  reader.number<double>("fence_s", &options.nvme.fence_s, 0, 3600);
  Status status = reader.finish();
  if (status.ok() && options.io != "auto" && options.io != "io_uring" && options.io != "threads") {
    return failed(MC_INVALID,
                  "nvmeof driver: option io is '" + options.io + "'; it must be auto, io_uring or threads");
  }
  return status;
}

}  // namespace mooncake::nvmeof
