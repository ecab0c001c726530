#include "options.hpp"

#include "support/options.hpp"

namespace mooncake::cxl {

Status parse_coherent(const std::string& text, Coherent& coherent) {
  if (text == "auto") return coherent = Coherent::kAuto, Status{};
  if (text == "true") return coherent = Coherent::kYes, Status{};
  if (text == "false") return coherent = Coherent::kNo, Status{};
  return failed(MC_INVALID, "cxl driver: coherent is '" + text + "'; it must be auto, true or false");
}

Status parse_options(const mc_option* given, size_t count, Options& options) {
  constexpr uint64_t kNoLimit = 1ull << 50;
  driver::OptionReader reader("cxl", given, count);
  Backing::Request& backing = options.pool.backing;
  std::string coherent = "auto";
  reader.text("path", &backing.path);
  reader.flag("create", &backing.create);
  reader.number<uint64_t>("size_bytes", &backing.size_bytes, 0, kNoLimit);
  reader.number<int>("numa_node", &backing.numa_node, -1, 1023);
  reader.number<uint32_t>("host", &options.pool.host, 0, kMostHosts - 1);
  reader.number<uint32_t>("hosts", &options.pool.hosts, 1, kMostHosts);
  reader.text("coherent", &coherent);
  reader.number<double>("lease_s", &options.pool.lease_s, 0.2, 8);
  reader.number<uint32_t>("workers", &options.workers, 0, 64);
  reader.number<uint64_t>("inline_bytes", &options.inline_bytes, 0, kNoLimit);
  reader.number<uint64_t>("streaming_bytes", &options.streaming_bytes, 0, kNoLimit);
  reader.number<uint64_t>("chunk_bytes", &options.chunk_bytes, 4096, kNoLimit);
  reader.number<uint64_t>("queue_depth", &options.queue_depth, 1, 1 << 20);
  if (Status status = reader.finish(); !status.ok()) return status;
  if (backing.path.empty()) {
    return failed(MC_INVALID, "cxl driver: the option path is missing: the DAX device or file of the pool");
  }
  return parse_coherent(coherent, options.pool.coherent);
}

}  // namespace mooncake::cxl
