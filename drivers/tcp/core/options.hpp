// Options of an endpoint. The Python plugin validates what users write; this parses what it rendered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "status.hpp"
#include "support/tls.hpp"

namespace mooncake_tcp {

struct Options {
  std::string host = "127.0.0.1";
  std::string advertise_host;  // what peers connect to; empty: where it listens
  uint32_t port_min = 0;       // 0: any free port
  uint32_t port_max = 0;
  uint32_t connections = 2;
  uint32_t workers = 2;
  uint64_t slice_bytes = 1u << 20;
  uint64_t window_bytes = 4u << 20;
  uint64_t socket_buffer_bytes =
      0;  // 0: a send buffer of 512 KiB on the same host, the system's autotuning elsewhere
  uint64_t connect_timeout_ms = 5000;
  uint64_t dead_peer_timeout_ms = 10000;
  uint64_t max_strangers = 256;  // connections that have not said hello
  std::string tls_ca;            // PEM files; all three or none
  std::string tls_certificate;
  std::string tls_key;
  std::shared_ptr<const mooncake::tls::Context> tls;  // made of them
};

// Makes `tls`; nothing when no files are given.
Status load_tls(Options* options);
Status parse_options(const mc_option* options, size_t count, Options* parsed);

}  // namespace mooncake_tcp
