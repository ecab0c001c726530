// The desk under a sanitizer: clients that ask on threads of their own, whole requests and damaged ones,
// while another thread holds the lock now and then, as the master's Python does, and one takes the desk off
// its port and puts it back. What an answer says must hold, and at the end every lease and every reservation
// has been given back.
//
//   desk_stress [seconds] [seed]   (`./dev sanitize` builds and runs it)
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>
#include <vector>

#include "desk.hpp"

namespace {

using namespace mooncake::store;
using Random = std::mt19937_64;
using Clock = std::chrono::steady_clock;

constexpr uint64_t kEpoch = 5, kSegment = 7, kValueBytes = 5000, kKeys = 60;
constexpr uint32_t kClients = 3;

std::atomic<uint64_t> answered{0}, turned_away{0}, damaged{0};

void require(bool so, const char* what) {
  if (so) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

std::vector<Digest> some_digests(Random& random) {
  std::vector<Digest> found(1 + random() % 8);
  for (Digest& digest : found) {
    uint64_t key = random() % kKeys;
    digest = Digest{};
    std::memcpy(&digest, &key, sizeof(key));
  }
  return found;
}

AskHead head_of(Express kind, uint64_t client) {
  AskHead head{};
  head.kind = kind;
  head.epoch = kEpoch;
  head.client = client;
  return head;
}

std::string ask(AskHead head, const std::vector<Digest>& digests) {
  head.keys = static_cast<uint32_t>(digests.size());
  std::string body;
  add(body, head);
  add_all(body, digests);
  if (head.kind != Express::kReserve) return body;
  for (size_t i = 0; i < digests.size(); ++i) add(body, kValueBytes);
  for (size_t i = 0; i < digests.size(); ++i) add(body, uint32_t{3});
  for (size_t i = 0; i < digests.size(); ++i) body += "key";
  return body;
}

class Client {
 public:
  Client(DeskPort& port, uint64_t number, uint64_t seed) : port_(port), number_(number), random_(seed) {}

  void step() {
    std::vector<Digest> digests = some_digests(random_);
    switch (random_() % 4) {
      case 0:
        put(digests);
        break;
      case 1:
        get(digests);
        break;
      case 2:
        if (auto head = answer(ask(head_of(Express::kExist, number_), digests), digests.size()))
          require(head->count == digests.size(), "every key has an answer");
        break;
      default:
        send_damaged(digests);
    }
  }

 private:
  // Nothing when the other way is to be taken.
  std::optional<AnswerHead> answer(const std::string& body, size_t least_bytes) {
    std::string reply = port_.answer(number_, body);
    AnswerHead head{};
    if (reply.size() >= sizeof(head)) std::memcpy(&head, reply.data(), sizeof(head));
    if (head.kind == Express::kOtherWay) {
      ++turned_away;
      return std::nullopt;
    }
    require(reply.size() >= sizeof(head) + least_bytes, "an answer has what its head says");
    ++answered;
    return head;
  }

  // What a client must have an answer to; it would ask the master's Python otherwise.
  AnswerHead insist(const std::string& body) {
    for (;;) {
      if (auto head = answer(body, 0)) return *head;
      std::this_thread::yield();
    }
  }

  void put(const std::vector<Digest>& digests) {
    AskHead head = head_of(Express::kReserve, number_);
    head.flags = kReplace;
    auto reserved = answer(ask(head, digests), digests.size());
    if (!reserved || reserved->id == 0) return;
    AskHead commit = head_of(Express::kCommit, number_);
    commit.id = reserved->id;
    commit.flags = kReplace;
    require(insist(ask(commit, {})).count <= digests.size(), "no more is committed than was reserved");
    require(insist(ask(commit, {})).count == 0, "a reservation ends once");
  }

  void get(const std::vector<Digest>& digests) {
    auto located = answer(ask(head_of(Express::kLocate, number_), digests), digests.size());
    if (!located || located->id == 0) return;
    AskHead release = head_of(Express::kRelease, number_);
    release.id = located->id;
    AskHead foreign = release;
    foreign.client = number_ % kClients + 1;
    require(!answer(ask(foreign, {}), 0), "nobody speaks for another client");
    require((insist(ask(release, {})).flags & kExpired) == 0, "a lease holds until it is released");
    require((insist(ask(release, {})).flags & kExpired) != 0, "and ends once");
  }

  // May be refused or be a request of another kind; must do no harm. The id is kept: it could be one's own
  // lease.
  void send_damaged(const std::vector<Digest>& digests) {
    static constexpr Express kKinds[] = {Express::kLocate, Express::kExist, Express::kReserve};
    std::string body = ask(head_of(kKinds[random_() % 3], number_), digests);
    if (random_() % 2 == 0) body.resize(random_() % body.size());
    for (size_t i = random_() % 4; i != 0 && !body.empty(); --i)
      body[random_() % body.size()] = static_cast<char>(random_());
    std::string reply = port_.answer(number_, body);
    ++damaged;
    AnswerHead head{};
    if (reply.size() >= sizeof(head)) std::memcpy(&head, reply.data(), sizeof(head));
    if (head.kind != Express::kLocate && head.kind != Express::kReserve) return;
    if (head.id == 0) return;
    AskHead end = head_of(head.kind == Express::kLocate ? Express::kRelease : Express::kCommit, number_);
    end.id = head.id;
    insist(ask(end, {}));
  }

  DeskPort& port_;
  const uint64_t number_;
  Random random_;
};

// What was reserved the other way with fewer keys than slots is nothing that could be committed.
void refuse_what_has_no_keys(ObjectMap& map, GrantTable& reservations, DeskPort& port) {
  Digest digest{};
  PutOptions put;
  put.wish.writer = 1;
  Reserved reserved = map.reserve(std::vector{digest}, std::vector{kValueBytes}, put);
  require(reserved.outcomes[0] == Outcome::kPlaced, "there is room in an empty segment");
  AskHead commit = head_of(Express::kCommit, 1);
  commit.id = reservations.grant(1, reserved.slots, now_s()).id;
  AnswerHead answer{};
  std::memcpy(&answer, port.answer(1, ask(commit, {})).data(), sizeof(answer));
  require(answer.kind == Express::kCommit && answer.count == 0, "nothing is committed");
  require(map.exist(std::vector{digest})[0] == 0 && reservations.size() == 0, "the room is given back");
}

// What the master's Python does between requests.
void look_after(Desk& desk, GrantTable& leases, ObjectMap& map, const std::atomic<bool>& done) {
  DeskLock& lock = desk.lock();
  while (!done) {
    lock.acquire();
    require(lock.is_mine(), "who acquires the lock has it");
    for (const Grant& grant : leases.take_expired(now_s())) map.release(grant.slots);
    desk.take_samples();
    desk.take_calls();
    for (uint32_t member : desk.take_rings()) {
      if (RecordStream* stream = map.stream(member)) map.confirm(member, stream->last());
    }
    lock.wait(0.0005);
    lock.release();
  }
}

}  // namespace

int main(int argc, char** argv) {
  auto end = Clock::now() + std::chrono::seconds(argc > 1 ? std::atoi(argv[1]) : 3);
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  ObjectMap map(4096, 0.01, Orders::Kind::kClock, {}, 1);
  GrantTable leases(600), reservations(600);
  Desk desk(map, leases, reservations, kEpoch, 1 << 20);
  for (uint32_t member = 1; member <= kClients; ++member) {
    map.add_member(member);
    // One is confined to its tenant, and has no key of these digests.
    std::string own_prefix = member == kClients ? "prefix of a tenant" : "";
    desk.admit(member, {.connection = member,
                        .number = member,
                        .node = 0,
                        .tenant = 0,
                        .express = true,
                        .own_prefix = own_prefix,
                        .heard_s = 0});
  }
  auto tenure = std::make_shared<Tenure>();
  tenure->last(lease_clock_s() + 3600);
  desk.lead(tenure);
  map.add_segment(kSegment, 1, 0, 256 << 10, true);  // less than all keys need: it evicts
  desk.describe(kSegment, "descriptor");
  DeskPort port;
  port.attach(&desk);
  refuse_what_has_no_keys(map, reservations, port);

  std::atomic<bool> done{false};
  std::vector<std::thread> clients;
  for (uint32_t number = 1; number <= kClients; ++number) {
    clients.emplace_back([&, number] {
      Client client(port, number, seed + number);
      while (Clock::now() < end) client.step();
    });
  }
  std::thread keeper([&] { look_after(desk, leases, map, done); });
  std::thread mover([&] {
    while (!done) {
      port.detach();
      port.attach(&desk);
      tenure->last(lease_clock_s() + 3600);
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  });
  for (std::thread& client : clients) client.join();
  done = true;
  keeper.join();
  mover.join();
  require(leases.size() == 0 && reservations.size() == 0, "every promise has ended");
  require(answered > 0 && damaged > 0, "there was something to answer");
  std::printf("desk: %llu answers, %llu turned away, %llu damaged\n",
              static_cast<unsigned long long>(answered.load()),
              static_cast<unsigned long long>(turned_away.load()),
              static_cast<unsigned long long>(damaged.load()));
  return 0;
}
