// The control thread: a peer that is busy with many keys, no descriptor left, and the tags of queue pairs.
#pragma once

#include <arpa/inet.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "address.hpp"
#include "channel.hpp"
#include "fabric.hpp"
#include "tags.hpp"

namespace checks {

namespace verbs = mooncake::verbs;
using mooncake::driver::UniqueFd;

inline verbs::Address address_of(const Side& side) {
  uint8_t blob[MC_BLOB_MAX];
  size_t length = sizeof blob;
  require(table->export_address(side.endpoint, blob, &length) == MC_OK, "an address");
  verbs::Address address;
  require(verbs::decode({reinterpret_cast<char*>(blob), length}, address).ok(), "of our own making");
  return address;
}

inline UniqueFd connected_to(const verbs::Address& address) {
  verbs::SocketAddress at;
  require(verbs::resolve(address.hosts.front(), address.port, at).ok(), "its host is known");
  UniqueFd made(socket(at.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  require(connect(made.get(), reinterpret_cast<sockaddr*>(&at.storage), at.length) == 0, "it accepts");
  return made;
}

// Between an endpoint and its peer: passes everything on, but an answer for a key only when the next one is
// there, as of a peer that is busy.
class Delayed {
 public:
  explicit Delayed(const verbs::Address& peer) : address_(peer) {
    require(verbs::listen_at("127.0.0.1", 0, listener_, address_).ok(), "it listens");
    thread_ = std::thread([this, peer] { run(peer); });
  }
  ~Delayed() {
    stopping_ = true;
    thread_.join();
  }
  std::string blob() const { return encode(address_); }

 private:
  void run(const verbs::Address& peer) {
    pollfd waiting{listener_.get(), POLLIN, 0};
    require(::poll(&waiting, 1, kDeadlineNs / 1'000'000) == 1, "the initiator dials");
    UniqueFd near(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    UniqueFd far = connected_to(peer);
    fcntl(far.get(), F_SETFL, O_NONBLOCK);
    verbs::Channel initiator(std::move(near)), target(std::move(far));
    while (!stopping_) {
      pollfd both[] = {{initiator.fd(), POLLIN, 0}, {target.fd(), POLLIN, 0}};
      ::poll(both, 2, 10);
      bool alive = initiator.receive() && target.receive();
      pass_on(initiator, target);
      pass_on(target, initiator);
      if (!alive) return;
    }
  }
  void pass_on(verbs::Channel& from, verbs::Channel& to) {
    verbs::Message kind;
    std::string payload;
    while (from.next(&kind, &payload)) {
      std::string whole = verbs::Writer(kind).bytes(payload.data(), payload.size()).finish();
      if (kind == verbs::Message::kImported) whole.swap(held_);
      if (!whole.empty()) to.send(whole);
    }
  }

  verbs::Address address_;
  UniqueFd listener_;
  std::string held_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// There is always one question that the peer has not answered, and it answers all the time.
inline void check_steady_importer() {
  constexpr uint64_t kTimeoutMs = 300;
  Options impatient = on("double0");
  impatient.push_back({"connect_timeout_ms", std::to_string(kTimeoutMs)});
  Side target(on("double1"), kBytes, 2), source(impatient, kBytes, 1);
  Delayed between(address_of(target));
  std::string blob = between.blob();
  require(table->connect(source.endpoint, blob.data(), blob.size(), &source.connection) == MC_OK,
          "connected");
  mc_handle before = source.name(2, kBytes);
  for (uint64_t until = now_ns() + 4 * kTimeoutMs * 1'000'000; now_ns() < until;) {
    mc_handle next = source.name(2, kBytes);
    source.submit({MC_WRITE, 0, source.connection, source.region, before, 0, 0, 64, 1});
    mc_completion done = source.wait();
    require(done.status == MC_OK, done.reason);
    table->release_key(source.endpoint, before);
    before = next;
  }
}

// With no descriptor left the listener rests, and does not keep a core busy; later it accepts again.
inline void check_no_descriptor() {
  Side source(on("double0"), kBytes, 1), target(on("double1"), kBytes, 2);
  verbs::Address there = address_of(target);
  UniqueFd first(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  rlimit before{};
  require(getrlimit(RLIMIT_NOFILE, &before) == 0, "the limit is known");
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(first.get()) + 1;
  require(setrlimit(RLIMIT_NOFILE, &none) == 0, "no more descriptors");
  sockaddr_in at{};
  at.sin_family = AF_INET, at.sin_port = htons(there.port), at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  require(connect(first.get(), reinterpret_cast<sockaddr*>(&at), sizeof at) == 0, "somebody waits");
  auto spent_ns = [] {
    timespec spent{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
    return static_cast<uint64_t>(spent.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(spent.tv_nsec);
  };
  uint64_t started = spent_ns();
  pollfd quiet{first.get(), POLLIN, 0};
  require(::poll(&quiet, 1, 1000) == 0, "who waits is not turned away");
  require(spent_ns() - started < 300'000'000, "a second without descriptors costs next to no processor time");
  require(setrlimit(RLIMIT_NOFILE, &before) == 0, "there are descriptors again");
  source.meet(target, 2);
  source.submit(source.op(MC_WRITE, 0, kBytes, 1));
  require(source.wait().status == MC_OK, "and the next peer is served");
}

// A slot is given to one queue pair at a time, and its next one is not taken for the one before.
inline void check_tags() {
  verbs::Tags tags;
  auto* qp = reinterpret_cast<verbs::QueuePair*>(64);
  std::set<uint32_t> slots;
  for (size_t i = 0; i < verbs::Tags::kMost; ++i) slots.insert(tags.give(qp) & 0xffff);
  require(slots.size() == verbs::Tags::kMost && tags.free() == 0, "each queue pair has a slot of its own");
  uint32_t old = 1u << 16 | 7;
  require(tags.find(old) == qp, "it is found");
  tags.take_back(old);
  require(tags.find(old) == nullptr && tags.free() == 1, "until it is gone");
  auto* other = reinterpret_cast<verbs::QueuePair*>(128);
  uint32_t fresh = tags.give(other);
  require(fresh == (2u << 16 | 7) && tags.find(fresh) == other, "its successor is found");
  require(tags.find(old) == nullptr && tags.find(3u << 16 | 7) == nullptr, "by its own tag only");
}

// More queue pairs than there are tags are refused when the endpoint opens.
inline void check_most_queue_pairs() {
  std::vector<mc_option> asked = {{"library", library.c_str()}, {"device", "double0"}, {"qps", "16"}};
  mc_handle endpoint = 0;
  asked.push_back({"max_connections", "4097"});
  require(table->open(asked.data(), asked.size(), &endpoint) == MC_INVALID, "too many are refused");
  require(std::string(table->last_error()).find("max_connections and qps: 4097 connections of 16") !=
              std::string::npos,
          "with the numbers");
  asked.back().value = "4096";
  require(table->open(asked.data(), asked.size(), &endpoint) == MC_OK, "as many as there are is fine");
  table->close(endpoint);
}

}  // namespace checks
