// Channels under many threads, to be run under ThreadSanitizer and AddressSanitizer (see .ci/sanitize):
// callers, notifiers, comers and goers and connections that are cut, with small limits so that every brake is
// used. Ends with a status other than 0 when an answer is wrong or anything does not end in time.
//
//   channel_stress [seconds] [ca.pem certificate.pem key.pem]
#include <sys/socket.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "channel.hpp"

namespace {

using mooncake::Channel;
using mooncake::ChannelLimits;
using mooncake::Code;
using mooncake::Event;
using mooncake::Status;

constexpr double kLimitS = 30;

std::atomic<uint64_t> calls{0}, notes{0}, refused{0}, cut{0};

uint64_t deadline() { return mooncake::deadline_after(kLimitS); }

void require(bool holds, const std::string& what) {
  if (holds) return;
  fprintf(stderr, "channel_stress: %s\n", what.c_str());
  _Exit(1);
}

void answer(Channel& channel, const std::atomic<bool>& stop) {
  Event event{};
  for (uint64_t after = 0; !stop;) {
    bool asked = channel.next_request(mooncake::deadline_after(0.05), &event, after);
    after = asked ? event.connection : 0;
    if (!asked) continue;
    std::string hello;
    channel.hello_of(event.connection, &hello);
    channel.reply(event.connection, event.request, event.method == "fail", event.body);
  }
}

// More slowly than they come, so that the senders run out of room.
void take_events(Channel& channel, const std::atomic<bool>& stop) {
  Event event;
  for (unsigned taken = 1; !stop; ++taken) {
    channel.next_event(mooncake::deadline_after(0.05), &event);
    if (taken % 8 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

// Calls and notifies over a connection that others use too; goes on when it was cut.
void talk(Channel& channel, uint64_t connection, unsigned seed, const std::atomic<bool>& stop) {
  for (unsigned i = seed; !stop; ++i) {
    std::string body((i * 7919u) % 40'000, static_cast<char>(i)), reply, failure;
    bool fails = i % 5 == 0;
    Status status = channel.call(connection, fails ? "fail" : "echo", body, deadline(), &reply, &failure);
    require(status.code != Code::kTimeout, "a call was not answered in time: " + status.reason);
    if (!status.ok()) return;
    require((fails ? failure : reply) == body, "an answer is wrong");
    ++calls;
    status = channel.notify(connection, "note", body, deadline());
    require(status.code != Code::kTimeout, "a notification found no room in time: " + status.reason);
    for (int k = 0; k < 200; ++k) {
      status = channel.try_notify(connection, "note", body);
      (status.ok() ? notes : refused) += 1;
      require(status.ok() || status.code == Code::kNoMemory || status.code == Code::kUnreachable,
              "try_notify: " + status.reason);
    }
  }
}

// Comes, asks once, and goes, in one of three ways.
void visit(Channel& here, Channel& there, unsigned seed, const std::atomic<bool>& stop) {
  for (unsigned i = seed; !stop; ++i) {
    uint64_t connection = 0;
    std::string hello, reply, failure;
    Status status = here.connect("127.0.0.1", there.port(), deadline(), &connection, &hello);
    require(status.ok(), status.reason);
    if (i % 3 != 0) {
      status = here.call(connection, "echo", "x", deadline(), &reply, &failure);
      require(status.ok() && reply == "x", "a visitor got no answer: " + status.reason);
    }
    if (i % 3 == 1) {
      std::thread breaker([&] { here.disconnect(connection); });
      status = here.call(connection, "echo", "y", deadline(), &reply, &failure);
      require(status.code != Code::kTimeout, "a call outlived its connection");
      breaker.join();
    }
    here.disconnect(connection);
    ++cut;
  }
}

}  // namespace

int main(int count, char** words) {
  double seconds = count > 1 ? atof(words[1]) : 5;
  ChannelLimits limits;
  limits.queued_messages = 16;
  limits.queued_bytes = limits.unsent_bytes = 256 << 10;
  Channel here(limits), there(limits);
  for (Channel* channel : {&here, &there}) {
    if (count > 4) {
      Status secured = channel->use_tls({words[2], words[3], words[4]}, true);
      require(secured.ok(), secured.reason);
    }
    require(channel->listen("127.0.0.1", 0, 0).ok(), "cannot listen");
    require(channel->start("hello").ok(), "cannot start");
  }
  std::atomic<bool> stop{false}, stop_serving{false};
  std::vector<std::thread> servers, clients;
  for (int i = 0; i < 3; ++i) servers.emplace_back([&] { answer(there, stop_serving); });
  servers.emplace_back([&] { take_events(there, stop_serving); });
  uint64_t connection = 0;
  std::string hello;
  Status connected = here.connect("127.0.0.1", there.port(), deadline(), &connection, &hello);
  require(connected.ok(), connected.reason);
  for (unsigned i = 0; i < 3; ++i) clients.emplace_back([&, i] { talk(here, connection, i * 1000, stop); });
  for (unsigned i = 0; i < 2; ++i) clients.emplace_back([&, i] { visit(here, there, i, stop); });
  clients.emplace_back([&] {
    while (!stop) here.alive(connection);
  });
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  stop = true;
  for (std::thread& client : clients) client.join();
  // Closing while the other side still asks.
  std::thread last([&] { talk(here, connection, 77, stop_serving); });
  there.close();
  last.join();
  stop_serving = true;
  for (std::thread& server : servers) server.join();
  printf("channel_stress: %lu calls, %lu notifications, %lu without room, %lu visits\n", calls.load(),
         notes.load(), refused.load(), cut.load());
  require(calls > 0 && notes > 0 && cut > 0, "nothing was tried");
  return 0;
}
