#include "options.hpp"

#include "support/options.hpp"
#include "tags.hpp"

namespace mooncake::verbs {

Status parse_options(const mc_option* given, size_t count, Options& options) {
  driver::OptionReader reader("verbs", given, count);
  reader.text("library", &options.library);
  reader.text("device", &options.device);
  reader.text("host", &options.host);
  reader.number<uint32_t>("port", &options.port, 0, 255);
  reader.number<int32_t>("gid_index", &options.gid_index, -1, 255);
  reader.number<uint32_t>("control_port", &options.control_port, 0, 65535);
  reader.number<uint32_t>("qps", &options.qps, 1, 16);
  reader.number<uint32_t>("send_depth", &options.send_depth, 32, 8192);
  reader.number<uint32_t>("completion_depth", &options.completion_depth, 64, 1 << 20);
  reader.number<uint32_t>("queue_depth", &options.queue_depth, 1, 1 << 20);
  reader.number<uint64_t>("slice_bytes", &options.slice_bytes, 4096, 1 << 30);
  reader.number<uint64_t>("window_bytes", &options.window_bytes, 4096, 1ull << 40);
  reader.number<uint32_t>("inline_bytes", &options.inline_bytes, 0, 1024);
  reader.number<uint32_t>("mtu", &options.mtu, 0, 4096);
  reader.number<uint32_t>("traffic_class", &options.traffic_class, 0, 255);
  reader.number<uint32_t>("service_level", &options.service_level, 0, 15);
  reader.number<uint32_t>("pkey_index", &options.pkey_index, 0, 65535);
  reader.number<uint32_t>("timeout", &options.timeout, 1, 31);
  reader.number<uint32_t>("retries", &options.retries, 0, 7);
  reader.number<uint32_t>("rd_atomic", &options.rd_atomic, 1, 255);
  reader.flag("relaxed_ordering", &options.relaxed_ordering);
  reader.number<uint64_t>("chunk_bytes", &options.chunk_bytes, 1 << 20, 1ull << 46);
  reader.number<uint32_t>("registration_threads", &options.registration_threads, 1, 64);
  reader.number<uint32_t>("max_connections", &options.max_connections, 1, 65536);
  reader.number<uint32_t>("connect_timeout_ms", &options.connect_timeout_ms, 1, 3'600'000);
  reader.number<uint32_t>("dead_peer_timeout_ms", &options.dead_peer_timeout_ms, 1, 3'600'000);
  if (Status status = reader.finish(); !status.ok()) return status;
  if (options.mtu != 0 && (options.mtu < 256 || (options.mtu & (options.mtu - 1)) != 0))
    return failed(MC_INVALID, "option mtu: " + std::to_string(options.mtu) +
                                  " is no RDMA MTU; give 256, 512, 1024, 2048 or 4096, or 0 for the port's");
  uint64_t most = uint64_t{options.max_connections} * options.qps;
  if (most > Tags::kMost)
    return failed(MC_INVALID, "options max_connections and qps: " + std::to_string(options.max_connections) +
                                  " connections of " + std::to_string(options.qps) + " queue pairs are " +
                                  std::to_string(most) + ", and an endpoint has at most " +
                                  std::to_string(Tags::kMost) + "; lower one of them");
  return {};
}

}  // namespace mooncake::verbs
