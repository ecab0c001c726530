#include "options.hpp"

#include "support/options.hpp"

namespace mooncake::ascend {

driver::Status parse_options(const mc_option* given, size_t count, Options& options) {
  driver::OptionReader reader("ascend", given, count);
  reader.text("library", &options.library);
  reader.text("shim", &options.shim);
  reader.number<uint32_t>("device", &options.device, 0, 1023);
  reader.text("host", &options.host);
  reader.text("buffer_pool", &options.buffer_pool);
  std::string path = "auto";
  reader.text("path", &path);
  reader.number<uint32_t>("rdma_traffic_class", &options.rdma_traffic_class, 0, 255);
  reader.number<uint32_t>("rdma_service_level", &options.rdma_service_level, 0, 7);
  reader.number<uint64_t>("queue_depth", &options.queue_depth, 1, 1 << 20);
  reader.number<uint64_t>("in_flight_bytes", &options.in_flight_bytes, 1 << 20, 1ull << 40);
  reader.number<double>("answer_timeout_s", &options.answer_timeout_s, 0.2, 3600);
  reader.number<double>("transfer_timeout_s", &options.transfer_timeout_s, 0.1, 3600);
  reader.flag("allow_other_users", &options.allow_other_users);
  if (driver::Status status = reader.finish(); !status.ok()) return status;
  if (path != "auto" && path != "hccs" && path != "rdma")
    return driver::failed(MC_INVALID,
                          "ascend driver: option path: '" + path + "' is none of auto, hccs and rdma");
  options.path = path == "rdma" ? Path::kRdma : path == "hccs" ? Path::kHccs : Path::kAuto;
  return {};
}

}  // namespace mooncake::ascend
