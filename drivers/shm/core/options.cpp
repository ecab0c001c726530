#include "options.hpp"

#include <charconv>
#include <cstring>
#include <string_view>

namespace mooncake::shm {
namespace {

template <class Number>
Status parse_number(std::string_view name, std::string_view text, Number least, Number most, Number& number) {
  Number parsed{};
  auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), parsed);
  if (error != std::errc{} || end != text.data() + text.size() || !(parsed >= least && parsed <= most)) {
    return failed(MC_INVALID, "option " + std::string(name) + ": '" + std::string(text) +
                                  "' is not a number from " + std::to_string(least) + " to " +
                                  std::to_string(most));
  }
  number = parsed;
  return {};
}

Status parse_option(std::string_view name, std::string_view text, Options& options) {
  constexpr uint64_t kNoLimit = 1ull << 40;
  if (name == "workers") return parse_number<uint32_t>(name, text, 0, 64, options.workers);
  if (name == "inline_bytes") return parse_number<uint64_t>(name, text, 0, kNoLimit, options.inline_bytes);
  if (name == "streaming_bytes")
    return parse_number<uint64_t>(name, text, 0, kNoLimit, options.streaming_bytes);
  if (name == "chunk_bytes") return parse_number<uint64_t>(name, text, 4096, kNoLimit, options.chunk_bytes);
  if (name == "queue_depth") return parse_number<uint64_t>(name, text, 1, 1 << 20, options.queue_depth);
  if (name == "answer_timeout_s")
    return parse_number<double>(name, text, 0.01, 3600, options.answer_timeout_s);
  if (name == "allow_other_users") {
    if (text != "true" && text != "false") {
      return failed(MC_INVALID,
                    "option allow_other_users: '" + std::string(text) + "' is neither true nor false");
    }
    options.allow_other_users = text == "true";
    return {};
  }
  return failed(MC_INVALID, "the shm driver has no option '" + std::string(name) + "'");
}

}  // namespace

Status parse_options(const mc_option* given, size_t count, Options& options) {
  if (given == nullptr && count > 0) return failed(MC_INVALID, "options are missing");
  for (size_t i = 0; i < count; ++i) {
    if (given[i].name == nullptr || given[i].value == nullptr)
      return failed(MC_INVALID, "an option has no name or value");
    if (Status status = parse_option(given[i].name, given[i].value, options); !status.ok()) return status;
  }
  return {};
}

}  // namespace mooncake::shm
