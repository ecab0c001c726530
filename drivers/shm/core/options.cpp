#include "options.hpp"

#include "support/options.hpp"

namespace mooncake::shm {

Status parse_options(const mc_option* given, size_t count, Options& options) {
  constexpr uint64_t kNoLimit = 1ull << 40;
  driver::OptionReader reader("shm", given, count);
  reader.number<uint32_t>("workers", &options.workers, 0, 64);
  reader.number<uint64_t>("inline_bytes", &options.inline_bytes, 0, kNoLimit);
  reader.number<uint64_t>("streaming_bytes", &options.streaming_bytes, 0, kNoLimit);
  reader.number<uint64_t>("chunk_bytes", &options.chunk_bytes, 4096, kNoLimit);
  reader.number<uint64_t>("queue_depth", &options.queue_depth, 1, 1 << 20);
  reader.number<double>("answer_timeout_s", &options.answer_timeout_s, 0.01, 3600);
  reader.flag("allow_other_users", &options.allow_other_users);
  return reader.finish();
}

}  // namespace mooncake::shm
