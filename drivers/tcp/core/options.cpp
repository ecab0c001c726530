#include "options.hpp"

#include <charconv>
#include <string_view>
#include <utility>

#include "wire.hpp"

namespace mooncake_tcp {

namespace {

template <typename Number>
struct Limits {
  std::string_view name;
  Number Options::* member;
  Number least;
  Number most;
};

constexpr std::pair<std::string_view, std::string Options::*> kTexts[] = {
    {"host", &Options::host},       {"advertise_host", &Options::advertise_host},
    {"tls_ca", &Options::tls_ca},   {"tls_certificate", &Options::tls_certificate},
    {"tls_key", &Options::tls_key},
};
constexpr Limits<uint32_t> kSmall[] = {
    {"port_min", &Options::port_min, 0, 65535},
    {"port_max", &Options::port_max, 0, 65535},
    {"connections", &Options::connections, 1, 64},
    {"workers", &Options::workers, 1, 64},
};
constexpr Limits<uint64_t> kLarge[] = {
    {"slice_bytes", &Options::slice_bytes, 4096, kMaxPayload},
    {"window_bytes", &Options::window_bytes, 4096, uint64_t{1} << 40},
    {"socket_buffer_bytes", &Options::socket_buffer_bytes, 0, uint64_t{1} << 30},
    {"connect_timeout_ms", &Options::connect_timeout_ms, 1, 3'600'000},
    {"dead_peer_timeout_ms", &Options::dead_peer_timeout_ms, 1, 3'600'000},
    {"max_strangers", &Options::max_strangers, 1, 65536},
};

template <typename Number>
Status store(const Limits<Number>& limits, std::string_view value, Options* parsed) {
  Number number{};
  auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error != std::errc() || end != value.data() + value.size() || number < limits.least ||
      number > limits.most) {
    return {MC_INVALID, "option " + std::string(limits.name) + "=" + std::string(value) +
                            " is not a number in " + std::to_string(limits.least) + ".." +
                            std::to_string(limits.most)};
  }
  parsed->*limits.member = number;
  return {};
}

Status parse_option(std::string_view name, std::string_view value, Options* parsed) {
  for (const auto& [known, member] : kTexts) {
    if (known != name) continue;
    parsed->*member = value;
    return {};
  }
  for (const auto& limits : kSmall) {
    if (limits.name == name) return store(limits, value, parsed);
  }
  for (const auto& limits : kLarge) {
    if (limits.name == name) return store(limits, value, parsed);
  }
  return {MC_INVALID, "unknown option " + std::string(name)};
}

}  // namespace

Status load_tls(Options* options) {
  bool any = !options->tls_ca.empty() || !options->tls_certificate.empty() || !options->tls_key.empty();
  if (!any) return {};
  if (options->tls_ca.empty() || options->tls_certificate.empty() || options->tls_key.empty()) {
    return {MC_INVALID, "TLS needs tls_ca, tls_certificate and tls_key, all three"};
  }
  std::string reason;
  options->tls =
      mooncake::tls::Context::make({options->tls_ca, options->tls_certificate, options->tls_key}, &reason);
  return options->tls ? Status{} : Status{MC_INVALID, "TLS: " + reason};
}

Status parse_options(const mc_option* options, size_t count, Options* parsed) {
  if (options == nullptr && count != 0) return {MC_INVALID, "the option list is null"};
  for (size_t i = 0; i < count; ++i) {
    if (options[i].name == nullptr || options[i].value == nullptr) return {MC_INVALID, "an option is null"};
    Status status = parse_option(options[i].name, options[i].value, parsed);
    if (!status.ok()) return status;
  }
  if (parsed->port_max == 0) parsed->port_max = parsed->port_min;
  if (parsed->port_max < parsed->port_min || (parsed->port_min == 0 && parsed->port_max != 0)) {
    return {MC_INVALID, "port range " + std::to_string(parsed->port_min) + ".." +
                            std::to_string(parsed->port_max) +
                            " is not one; give 1 <= port_min <= port_max, or neither for any free port"};
  }
  return {};
}

}  // namespace mooncake_tcp
