// Malformed frames against a live endpoint of the tcp driver. A good peer is served in between, the region
// stays as it was, and no descriptor is left over. Usage: FRAMES SEED, where FRAMES are those that the
// endpoint has looked at and found wrong: it refused them, or hung up because of them.
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "driver_endpoint.hpp"
#include "leftovers.hpp"
#include "wire.hpp"

namespace sanitized {
namespace {

using mooncake_tcp::Header;
using mooncake_tcp::Op;

constexpr size_t kRegion = 64 << 10;
constexpr size_t kMostRequests = 64;  // of one connection
constexpr size_t kCheckEvery = 1000;  // connections
constexpr double kAnswerS = 60;
// An address is "MCTA", the nonce, the port, and hosts, which need not be known here.
constexpr size_t kNonceAt = 4, kPortAt = 20;

class Fuzz {
 public:
  Fuzz(uint64_t frames, uint64_t seed) : frames_(frames), random_(seed) {
    address_ = target_.address();
    region_ = target_.add(pages_, &exported_);
    local_ = initiator_.add(place_, &unused_);
    remote_ = initiator_.import(connection_ = initiator_.connect(address_), exported_);
    for (size_t i = 0; i < kRegion; ++i) pages_.bytes[i] = static_cast<char>(i * 13);
    before_.assign(pages_.bytes, kRegion);
  }

  void run() {
    check_good_peer();
    size_t held = open_descriptors();
    Leftovers leftovers;
    for (size_t connections = 0; ended_ + refused_ < frames_; ++connections) {
      attack();
      refused_ = target_refused();
      if (connections % kCheckEvery == 0) check_good_peer();
      if (ended_ + refused_ < frames_ / 2) leftovers.halfway();
    }
    check_good_peer();
    uint64_t deadline = seconds_from_now(kAnswerS);
    while (open_descriptors() > held) {
      require(now_ns() < deadline, "descriptors are left over");
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    require(leftovers.fine(), "memory has grown in the second half");
    std::printf("tcp: %lu frames refused, %lu ended their connection, %zu KiB more than halfway\n",
                static_cast<unsigned long>(refused_), static_cast<unsigned long>(ended_),
                leftovers.grown() >> 10);
  }

 private:
  uint64_t edge() {
    constexpr uint64_t kEdges[] = {
        0,          1,          63,         64,         kRegion - 1,      kRegion,     kRegion + 1,
        1ull << 30, 1ull << 31, 1ull << 32, 1ull << 63, ~uint64_t{0} - 1, ~uint64_t{0}};
    return random_() % 4 ? kEdges[random_() % std::size(kEdges)] : random_();
  }

  Header forged(uint64_t seq) {
    Header header;
    header.op = static_cast<uint8_t>(random_() % 2 ? Op::kRead : Op::kWrite);
    header.seq = seq;
    header.region_id = random_() % 2 ? exported_.region_id : edge();
    header.remote_offset = edge();
    header.length = 1 + random_() % 64;
    for (uint8_t& byte : header.key) byte = static_cast<uint8_t>(random_());
    if (random_() % 4 == 0) {
      std::memcpy(header.key.data(), exported_.key.bytes, MC_KEY_BYTES);
      header.remote_offset = kRegion + random_() % kRegion;
    }
    return header;
  }

  // A request that must be refused.
  void append_forged(std::string& out, uint64_t seq) {
    Header header = forged(seq);
    out.append(reinterpret_cast<const char*>(&header), sizeof header);
    if (header.op == static_cast<uint8_t>(Op::kWrite)) out.append(header.length, 'w');
  }

  // A frame that is no request at all, because of a byte or several.
  void append_senseless(std::string& out, uint64_t seq) {
    Header header = forged(seq);
    while (header.well_formed()) {
      size_t at = random_() % sizeof header;
      reinterpret_cast<uint8_t*>(&header)[at] ^= static_cast<uint8_t>(1 + random_() % 255);
    }
    out.append(reinterpret_cast<const char*>(&header), sizeof header);
  }

  void attack() {
    int client = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    uint16_t port;
    std::memcpy(&port, address_.data() + kPortAt, sizeof port);
    at.sin_port = htons(port);
    require(connect(client, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0, "no connection is accepted");
    std::string out;
    Header hello;
    hello.op = static_cast<uint8_t>(Op::kHello);
    std::memcpy(hello.key.data(), address_.data() + kNonceAt, MC_KEY_BYTES);
    bool greets = random_() % 16 != 0;
    if (greets) out.assign(reinterpret_cast<const char*>(&hello), sizeof hello);
    uint64_t seq = 1;
    for (uint64_t count = random_() % kMostRequests; seq <= count; ++seq) append_forged(out, seq);
    bool begun = random_() % 16 == 0;  // the last one only, where this side ends the connection
    if (begun) {
      Header header = forged(seq);
      out.append(reinterpret_cast<const char*>(&header), 1 + random_() % (sizeof header - 1));
    } else {
      append_senseless(out, seq);
    }
    exchange(client, out, begun);
    close(client);
    ended_ += begun ? 0 : 1;
  }

  uint64_t target_refused() {
    mc_stats stats{};
    stats.struct_size = sizeof stats;
    require(target_.table().stats(target_.handle(), &stats) == MC_OK, "no counters");
    return stats.refused;
  }

  // Sends all of it and reads whatever comes until the other end has had enough, or was told that no more
  // comes.
  void exchange(int client, const std::string& out, bool tell_end) {
    char answer[4096];
    size_t done = 0;
    for (uint64_t deadline = seconds_from_now(kAnswerS); now_ns() < deadline;) {
      pollfd ready{client, static_cast<short>(POLLIN | (done < out.size() ? POLLOUT : 0)), 0};
      poll(&ready, 1, 1000);
      if (ready.revents & (POLLIN | POLLHUP | POLLERR)) {
        if (recv(client, answer, sizeof answer, MSG_DONTWAIT) <= 0) return;
      }
      if (ready.revents & POLLOUT) {
        ssize_t sent = send(client, out.data() + done, out.size() - done, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent < 0) return;
        done += static_cast<size_t>(sent);
        if (done == out.size() && tell_end) shutdown(client, SHUT_WR);
      }
    }
    fail("the endpoint neither answers nor hangs up");
  }

  void check_good_peer() {
    Operations read(1);
    mc_op& op = read.ops[0];
    op.opcode = MC_READ;
    op.connection = connection_;
    op.local = local_;
    op.remote = remote_;
    op.length = kRegion;
    initiator_.submit(read);
    require(read.wait(kAnswerS) && read.slots[0].result.status == MC_OK, "a good peer is not served");
    require(before_.compare(0, kRegion, place_.bytes, kRegion) == 0, "the region has changed");
  }

  const uint64_t frames_;
  uint64_t refused_ = 0, ended_ = 0;
  std::mt19937_64 random_;
  Pages pages_{kRegion}, place_{kRegion};
  std::string before_, address_;
  Endpoint target_{"tcp", ""}, initiator_{"tcp", ""};
  Exported exported_, unused_;
  mc_handle region_ = 0, local_ = 0, connection_ = 0, remote_ = 0;
};

}  // namespace
}  // namespace sanitized

int main(int count, char** words) {
  sanitized::require(count == 3, "usage: tcp_fuzz FRAMES SEED");
  sanitized::Fuzz(std::strtoull(words[1], nullptr, 10), std::strtoull(words[2], nullptr, 10)).run();
  return 0;
}
