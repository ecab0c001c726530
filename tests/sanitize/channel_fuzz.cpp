// Malformed frames against live channels, in both directions: strangers that connect, and a server that
// answers nonsense. After every batch a good peer must get its answer at once; at the end no descriptor and
// no memory may be left over. To be run under AddressSanitizer and UndefinedBehaviorSanitizer too (see
// .ci/sanitize).
//
//   channel_fuzz [malformed frames, default 20000] [seed, default from the clock; printed]
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "channel.hpp"
#include "leftovers.hpp"

namespace {

using namespace mooncake;

constexpr uint64_t kBatch = 1000;

void require(bool holds, const std::string& what) {
  if (holds) return;
  fprintf(stderr, "channel_fuzz: %s\n", what.c_str());
  _Exit(1);
}

using Random = std::mt19937_64;

uint64_t below(Random& random, uint64_t limit) { return random() % limit; }

std::string noise(Random& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& byte : bytes) byte = static_cast<char>(random());
  return bytes;
}

std::string frame(uint8_t type, const std::string& method, const std::string& body, uint64_t request) {
  FrameHeader header{static_cast<uint32_t>(body.size()), kFrameVersion, type,
                     static_cast<uint16_t>(method.size()), request};
  return std::string(reinterpret_cast<const char*>(&header), sizeof(header)) + method + body;
}

std::string some_frame(Random& random) {
  return frame(static_cast<uint8_t>(1 + below(random, 7)), noise(random, below(random, 20)),
               noise(random, below(random, 300)), below(random, 4) == 0 ? random() : below(random, 64));
}

// One frame that is not as it should be; what follows on the connection has lost its meaning.
std::string malformed(Random& random) {
  std::string good = some_frame(random);
  switch (below(random, 8)) {
    case 0:
      return noise(random, 1 + below(random, 200));
    case 1:  // cut short
      return good.substr(0, 1 + below(random, good.size()));
    case 2:  // flipped bits
      for (uint64_t flips = 1 + below(random, 8); flips > 0; --flips) {
        good[below(random, good.size())] ^= static_cast<char>(1 << below(random, 8));
      }
      return good;
    case 3: {  // a length that is a lie
      uint32_t length = static_cast<uint32_t>(random()) | 1u << below(random, 32);
      memcpy(good.data(), &length, sizeof(length));
      return good;
    }
    case 4:  // another version
      good[4] = static_cast<char>(2 + below(random, 254));
      return good;
    case 5:  // an unknown type
      good[5] = static_cast<char>(8 + below(random, 248));
      return good;
    case 6:  // the beginning of TLS
      return std::string("\x16\x03\x01", 3) + noise(random, below(random, 300));
    default: {  // many hellos
      std::string hellos;
      for (uint64_t i = 2 + below(random, 20); i > 0; --i)
        hellos += frame(kTypeHello, "", noise(random, 9), i);
      return hellos;
    }
  }
}

// What is sent over one connection: some order, then the malformed frame.
std::string scene(Random& random, bool greets, uint8_t greeting) {
  std::string bytes;
  if (greets) bytes += frame(greeting, "", noise(random, below(random, 64)), 1);
  for (uint64_t i = below(random, 4); greets && i > 0; --i) {
    bytes += frame(below(random, 2) == 0 ? kTypeRequest : kTypeNotify, noise(random, below(random, 9)),
                   noise(random, below(random, 99)), random());
  }
  return bytes + malformed(random);
}

// Sends, in pieces now and then, and ends the connection: abruptly, so that no port stays in TIME_WAIT.
void play(int fd, Random& random, const std::string& bytes) {
  size_t piece = below(random, 4) == 0 ? 1 + below(random, 40) : bytes.size();
  for (size_t at = 0; at < bytes.size(); at += piece) {
    if (send(fd, bytes.data() + at, std::min(piece, bytes.size() - at), MSG_NOSIGNAL) <= 0) break;
  }
  if (below(random, 4) == 0) {  // waits for the answer or the end
    timeval soon{0, 2000};
    setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &soon, sizeof(soon));
    char answer[512];
    [[maybe_unused]] ssize_t ignored = recv(fd, answer, sizeof(answer), 0);
  }
  linger abrupt{1, 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &abrupt, sizeof(abrupt));
  close(fd);
}

int connect_plainly(uint16_t port) {
  int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(port);
  to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0,
          "the channel lets nobody in any more");
  return fd;
}

// Connects to a server that greets or does not, and then answers nonsense.
void ask_a_strange_server(Channel& channel, int server, uint16_t port, uint64_t salt) {
  std::thread strange([&] {
    Random random(salt);
    play(accept(server, nullptr, nullptr), random, scene(random, below(random, 2) == 0, kTypeHelloAck));
  });
  uint64_t connection = 0;
  std::string hello, reply, failure;
  Status status = channel.connect("127.0.0.1", port, deadline_after(10), &connection, &hello);
  if (status.ok()) status = channel.call(connection, "x", "y", deadline_after(10), &reply, &failure);
  require(status.code != Code::kTimeout, "a call outlived the server's end");
  channel.disconnect(connection);
  strange.join();
}

void start(Channel& channel) {
  require(channel.listen("127.0.0.1", 0, 0).ok() && channel.start("hello").ok(), "a channel does not start");
}

}  // namespace

int main(int count, char** words) {
  uint64_t frames = count > 1 ? strtoull(words[1], nullptr, 10) : 20'000;
  uint64_t seed = count > 2 ? strtoull(words[2], nullptr, 10) : std::random_device{}();
  printf("channel_fuzz: %lu malformed frames, seed %lu\n", frames, seed);
  fflush(stdout);
  Random random(seed);
  std::atomic<bool> stop{false};
  Channel target, friendly;
  start(target);
  start(friendly);
  std::thread answering([&] {
    Event event;
    while (!stop) {
      if (target.next_request(deadline_after(0.05), &event))
        target.reply(event.connection, event.request, false, event.body);
    }
  });
  std::thread taking([&] {
    Event event;
    while (!stop) target.next_event(deadline_after(0.05), &event);
  });
  int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(at);
  require(bind(server, reinterpret_cast<sockaddr*>(&at), length) == 0 && listen(server, 16) == 0 &&
              getsockname(server, reinterpret_cast<sockaddr*>(&at), &length) == 0,
          "cannot listen");
  uint64_t good = 0;
  std::string hello;
  Status status = friendly.connect("127.0.0.1", target.port(), deadline_after(10), &good, &hello);
  require(status.ok(), status.reason);
  size_t descriptors = sanitized::open_descriptors();
  sanitized::Leftovers leftovers;
  for (uint64_t done = 0; done < frames; ++done) {
    if (done % 16 != 15) {  // a stranger comes
      play(connect_plainly(target.port()), random, scene(random, below(random, 4) != 0, kTypeHello));
    } else {  // a strange server answers
      ask_a_strange_server(target, server, ntohs(at.sin_port), random());
    }
    if (done % kBatch != kBatch - 1) continue;
    std::string reply, failure, body = noise(random, 100);
    status = friendly.call(good, "echo", body, deadline_after(10), &reply, &failure);
    require(status.ok() && reply == body, "a good peer got no answer: " + status.reason);
    if (done < frames / 2) leftovers.halfway();
  }
  uint64_t until = deadline_after(10);
  while (sanitized::open_descriptors() > descriptors && now_ns() < until) usleep(1000);
  size_t left = sanitized::open_descriptors() - descriptors;
  require(left == 0, std::to_string(left) + " descriptors are left over");
  require(leftovers.fine(), std::to_string(leftovers.grown() >> 10) + " KiB are left over");
  stop = true;
  answering.join();
  taking.join();
  close(server);
  printf("channel_fuzz: %llu frames, answered to the end; 0 descriptors and %zu KiB more than halfway\n",
         static_cast<unsigned long long>(frames), leftovers.grown() >> 10);
  return 0;
}
