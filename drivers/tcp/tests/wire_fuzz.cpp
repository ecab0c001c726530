// Speaks nonsense to an endpoint: as an initiator to its listener, and as a target that it connects to.
//
//   tcp_wire_fuzz FRAMES SEED
//
// FRAMES are those that the endpoint has looked at and found wrong: it refused them, or hung up because of
// them. Built and run with sanitizers by .ci/sanitize. Exits 0 when the endpoint survives, still serves, and
// has touched no byte outside its region.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "driver.hpp"
#include "leftovers.hpp"
#include "wire.hpp"

namespace {

using mooncake_tcp::Header;
using mooncake_tcp::Op;

constexpr uint64_t kRegionBytes = 64 << 10;
constexpr size_t kMargin = 4096;
constexpr std::byte kUntouched{0xA5};
constexpr uint64_t kRegionId = 7;
constexpr int kDeadlineMs = 20'000;
constexpr uint64_t kMostPayload = 4096;  // of a write that goes out whole
constexpr uint64_t kMostRequests = 64;   // of one connection

const mc_driver_v1* const driver = mooncake_tcp::driver_table();
std::mt19937_64 dice;

uint64_t roll(uint64_t sides) { return dice() % sides; }

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "tcp_wire_fuzz: %s\n", what.c_str());
  exit(1);
}

void check(mc_status status, const char* what) {
  if (status != MC_OK) fail(std::string(what) + ": " + driver->last_error());
}

uint64_t odd_number() {
  constexpr uint64_t kEdges[] = {0,
                                 1,
                                 63,
                                 64,
                                 65,
                                 4096,
                                 kRegionBytes - 1,
                                 kRegionBytes,
                                 kRegionBytes + 1,
                                 1ull << 30,
                                 (1ull << 30) + 1,
                                 1ull << 63,
                                 ~0ull};
  return roll(2) == 0 ? kEdges[roll(std::size(kEdges))] : dice();
}

void mutate(Header* header) {
  for (uint64_t times = roll(3); times > 0; --times) {
    switch (roll(11)) {
      case 0:
        header->magic = static_cast<uint32_t>(odd_number());
        break;
      case 1:
        header->version = static_cast<uint8_t>(roll(4));
        break;
      case 2:
        header->op = static_cast<uint8_t>(roll(9));
        break;
      case 3:
        header->flags = static_cast<uint16_t>(odd_number());
        break;
      case 4:
        header->seq = odd_number();
        break;
      case 5:
        header->region_id = odd_number();
        break;
      case 6:
        header->key[roll(MC_KEY_BYTES)] ^= static_cast<uint8_t>(1 + roll(255));
        break;
      case 7:
        header->remote_offset = odd_number();
        break;
      case 8:
        header->length = odd_number();
        break;
      case 9:
        header->reserved = static_cast<uint32_t>(odd_number());
        break;
      default:
        header->status = static_cast<int32_t>(odd_number());
        break;
    }
  }
}

void append(std::string* bytes, const Header& header) {
  bytes->append(reinterpret_cast<const char*>(&header), sizeof(header));
}

// ---- sockets of the one who speaks nonsense

struct Socket {
  explicit Socket(int fd) : fd(fd) {
    if (fd < 0) fail(std::string("no socket: ") + strerror(errno));
  }
  ~Socket() {
    if (roll(2) == 0) {
      linger abort{1, 0};
      setsockopt(fd, SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
    }
    close(fd);
  }
  Socket(const Socket&) = delete;
  // False when the other side has had enough.
  bool send_all(const std::string& bytes) const {
    for (size_t at = 0; at < bytes.size();) {
      ssize_t sent = send(fd, bytes.data() + at, bytes.size() - at, MSG_NOSIGNAL | MSG_DONTWAIT);
      if (sent > 0) {
        at += static_cast<size_t>(sent);
      } else if (errno != EAGAIN || !drain(1, true)) {
        return false;
      }
    }
    return true;
  }
  // Reads what is there, waiting for the first of it, or else for `room` to send. False: the other side hung
  // up.
  bool drain(int timeout_ms, bool room = false) const {
    pollfd waiting{fd, static_cast<short>(POLLIN | (room ? POLLOUT : 0)), 0};
    if (timeout_ms > 0) poll(&waiting, 1, timeout_ms);
    char trash[65536];
    while (true) {
      ssize_t received = recv(fd, trash, sizeof(trash), MSG_DONTWAIT);
      if (received == 0) return false;
      if (received < 0) return errno == EAGAIN;
    }
  }
  // Reads until the other side hangs up.
  void outlast() const {
    for (int waited = 0; drain(1);) {
      if (++waited > kDeadlineMs) fail("the endpoint does not hang up");
    }
  }
  bool receive_all(void* to, size_t length) const {
    for (size_t at = 0; at < length;) {
      pollfd waiting{fd, POLLIN, 0};
      if (poll(&waiting, 1, kDeadlineMs) != 1) fail("no answer");
      ssize_t received = recv(fd, static_cast<char*>(to) + at, length - at, 0);
      if (received <= 0) return false;
      at += static_cast<size_t>(received);
    }
    return true;
  }
  int fd;
};

sockaddr_in loopback(uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int connected(uint16_t port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = loopback(port);
  return connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0 ? fd : -1;
}

// ---- the endpoint

struct Endpoint {
  Endpoint() : memory(kRegionBytes + 2 * kMargin, kUntouched) {
    // One worker: strangers' writes may overlap, which is their affair, and ThreadSanitizer would report it.
    const mc_option options[] = {{"connect_timeout_ms", "2000"}, {"workers", "1"}};
    check(driver->open(options, std::size(options), &handle), "open");
    mc_memory region{};
    region.struct_size = sizeof(region);
    region.fd = -1;
    region.address = reinterpret_cast<uint64_t>(memory.data() + kMargin);
    region.length = kRegionBytes;
    region.region_id = kRegionId;
    std::fill(std::begin(region.key), std::end(region.key), uint8_t{3});
    check(driver->register_memory(handle, &region, &local), "register");
    char blob[MC_BLOB_MAX];
    size_t length = sizeof(blob);
    check(driver->export_address(handle, blob, &length), "address");
    std::copy(blob + 4, blob + 4 + MC_KEY_BYTES, nonce.begin());
    port = static_cast<uint16_t>(static_cast<uint8_t>(blob[20]) | static_cast<uint8_t>(blob[21]) << 8);
  }
  void check_margins() const {
    auto touched = [](std::byte value) { return value != kUntouched; };
    if (std::any_of(memory.begin(), memory.begin() + kMargin, touched) ||
        std::any_of(memory.end() - kMargin, memory.end(), touched)) {
      fail("bytes outside the region were written");
    }
  }

  std::vector<std::byte> memory;
  mc_handle handle = 0, local = 0;
  mooncake_tcp::Key nonce{};
  uint16_t port = 0;
};

Header hello_to(const Endpoint& endpoint) {
  Header hello;
  hello.op = static_cast<uint8_t>(Op::kHello);
  hello.key = endpoint.nonce;
  hello.region_id = roll(4);
  hello.flags = static_cast<uint16_t>(roll(3));
  hello.remote_offset = roll(4);
  return hello;
}

Header request(uint64_t seq) {
  Header header;
  header.op = static_cast<uint8_t>(roll(2) == 0 ? Op::kWrite : Op::kRead);
  header.seq = seq;
  header.region_id = kRegionId;
  header.key.fill(3);
  header.remote_offset = roll(kRegionBytes);
  header.length = 1 + roll(std::min<uint64_t>(kRegionBytes - header.remote_offset, 300));
  return header;
}

// To a target that has greeted; otherwise it answers, with a refusal or not.
bool ends_connection(const Header& header) {
  bool asks = header.op == static_cast<uint8_t>(Op::kWrite) || header.op == static_cast<uint8_t>(Op::kRead);
  return !header.well_formed() || !asks || header.length == 0 || header.seq == 0;
}

bool carries_payload(const Header& header) { return header.op == static_cast<uint8_t>(Op::kWrite); }

// Right, or wrong in a way that does not end the connection.
Header answerable(uint64_t seq) {
  while (true) {
    Header header = request(seq);
    if (roll(2) == 0) mutate(&header);
    if (!ends_connection(header) && (!carries_payload(header) || header.length <= kMostPayload))
      return header;
  }
}

Header senseless(uint64_t seq) {
  while (true) {
    Header header = request(seq);
    mutate(&header);
    if (ends_connection(header)) return header;
  }
}

// One connection to the listener; true when the endpoint hung up on it. The last frame makes sure of that,
// unless it is only begun: then this side ends the connection.
bool speak_as_initiator(const Endpoint& endpoint) {
  Socket peer(connected(endpoint.port));
  Header hello = hello_to(endpoint);
  if (roll(8) == 0) mutate(&hello);
  std::string bytes;
  append(&bytes, hello);
  uint64_t seq = 1;
  for (uint64_t count = roll(kMostRequests); seq <= count; ++seq) {
    Header header = answerable(seq);
    append(&bytes, header);
    if (carries_payload(header)) bytes.resize(bytes.size() + header.length, 'w');
  }
  bool begun = roll(16) == 0;
  append(&bytes, begun ? request(seq) : senseless(seq));
  if (begun) bytes.resize(bytes.size() - 1 - roll(sizeof(Header) - 1));
  if (!peer.send_all(bytes)) return true;
  if (begun) {
    peer.drain(1);
    return false;
  }
  peer.outlast();
  return true;
}

uint64_t refused_by(const Endpoint& endpoint) {
  mc_stats stats{};
  stats.struct_size = sizeof(stats);
  check(driver->stats(endpoint.handle, &stats), "stats");
  return stats.refused;
}

void check_it_still_serves(const Endpoint& endpoint) {
  Socket peer(connected(endpoint.port));
  Header hello;
  hello.op = static_cast<uint8_t>(Op::kHello);
  hello.key = endpoint.nonce;
  Header read = request(1);
  read.op = static_cast<uint8_t>(Op::kRead);
  std::string bytes, payload(read.length, 0);
  append(&bytes, hello);
  append(&bytes, read);
  Header welcome, answer;
  bool served = peer.send_all(bytes) && peer.receive_all(&welcome, sizeof(welcome)) &&
                peer.receive_all(&answer, sizeof(answer)) && peer.receive_all(payload.data(), payload.size());
  if (!served || welcome.status != MC_OK || answer.status != MC_OK || answer.length != read.length) {
    fail("the endpoint does not serve any more");
  }
}

// ---- the endpoint as an initiator

class Target {
 public:
  explicit Target(Endpoint& endpoint) : endpoint_(endpoint), listener_(listening(&port_)) {
    std::string blob("MCTA", 4);
    blob.append(MC_KEY_BYTES, 'n');
    blob += {static_cast<char>(port_ & 0xff), static_cast<char>(port_ >> 8), 1, 9};
    blob += "127.0.0.1";
    check(driver->connect(endpoint.handle, blob.data(), blob.size(), &connection_), "connect");
    const uint8_t key[MC_KEY_BYTES] = {};
    check(
        driver->import_key(endpoint.handle, connection_, kRegionId, key, kRegionBytes, nullptr, 0, &remote_),
        "import");
  }
  ~Target() {
    driver->release_key(endpoint_.handle, remote_);
    driver->disconnect(endpoint_.handle, connection_);
  }

  // Some operations, answered with nonsense until all have ended. Returns how often the endpoint hung up.
  uint64_t answer_some() {
    mc_op ops[8] = {};
    for (mc_op& op : ops) {
      op = {static_cast<uint32_t>(roll(2)),
            0,
            connection_,
            endpoint_.local,
            remote_,
            roll(1000),
            roll(1000),
            1 + roll(1000),
            1};
    }
    size_t accepted = 0;
    check(driver->submit(endpoint_.handle, ops, std::size(ops), &accepted), "submit");
    uint64_t ended = 0;
    for (int waited = 0; accepted > 0 || !answered_.empty(); ++waited) {
      if (waited > kDeadlineMs) fail("operations did not end, or connections");
      mc_completion completions[8];
      size_t count = 0;
      driver->poll(endpoint_.handle, completions, std::size(completions), &count);
      accepted -= count;
      ended += std::erase_if(answered_, [](const auto& initiator) { return !initiator->drain(0); });
      pollfd waiting{listener_.fd, POLLIN, 0};
      if (poll(&waiting, 1, count == 0 ? 1 : 0) == 1) answer(accept(listener_.fd, nullptr, nullptr));
    }
    return ended;
  }

 private:
  static int listening(uint16_t* port) {
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = loopback(0);
    socklen_t length = sizeof(address);
    if (bind(fd, reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(fd, 64) != 0) return -1;
    getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length);
    *port = ntohs(address.sin_port);
    return fd;
  }

  // The last frame is one after which the endpoint hangs up.
  void answer(int fd) {
    auto initiator = std::make_unique<Socket>(fd);
    pollfd gone{fd, POLLRDHUP, 0};
    if (poll(&gone, 1, 0) == 1) return;  // it will not look at the answers
    Header welcome;
    welcome.op = static_cast<uint8_t>(Op::kWelcome);
    if (roll(8) == 0) mutate(&welcome);
    std::string bytes;
    append(&bytes, welcome);
    for (uint64_t seq = 1; seq <= roll(16); ++seq) append_answer(&bytes, seq);
    Header last;
    while (last.well_formed()) mutate(&last);
    append(&bytes, last);
    initiator->send_all(bytes);
    answered_.push_back(std::move(initiator));
  }

  static void append_answer(std::string* bytes, uint64_t seq) {
    Header header;
    header.op = static_cast<uint8_t>(roll(2) == 0 ? Op::kWriteDone : Op::kReadData);
    header.seq = seq;
    if (header.op == static_cast<uint8_t>(Op::kReadData)) header.length = 1 + roll(1000);
    mutate(&header);
    append(bytes, header);
    bytes->resize(bytes->size() + header.length % 1024, 'r');
  }

  Endpoint& endpoint_;
  uint16_t port_ = 0;
  Socket listener_;
  std::vector<std::unique_ptr<Socket>> answered_;  // and not hung up yet
  mc_handle connection_ = 0, remote_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) fail("usage: tcp_wire_fuzz FRAMES SEED");
  const uint64_t wanted = strtoull(argv[1], nullptr, 10);
  dice.seed(strtoull(argv[2], nullptr, 10));
  Endpoint endpoint;
  uint64_t ended = 0, refused = 0, ended_by_initiator = 0;
  sanitized::Leftovers leftovers;
  while (ended + refused < wanted) {
    ended += speak_as_initiator(endpoint) ? 1 : 0;
    refused = refused_by(endpoint);
    if (ended + refused < wanted / 2) leftovers.halfway();
  }
  check_it_still_serves(endpoint);
  {
    Target target(endpoint);
    while (ended_by_initiator < wanted / 100) ended_by_initiator += target.answer_some();
  }
  check_it_still_serves(endpoint);
  endpoint.check_margins();
  if (!leftovers.fine()) fail(std::to_string(leftovers.grown() >> 10) + " KiB are left over");
  driver->close(endpoint.handle);
  endpoint.check_margins();
  printf("%llu frames refused, %llu ended their connection, %llu as target, %zu KiB more than halfway\n",
         static_cast<unsigned long long>(refused), static_cast<unsigned long long>(ended),
         static_cast<unsigned long long>(ended_by_initiator), leftovers.grown() >> 10);
}
