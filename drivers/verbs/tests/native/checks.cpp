// What can only be said of the core from C++: which address it chooses, that notices keep their promises, and
// what fence() ends. `checks LIBRARY NAME` runs one and ends with 0, or says what is not so.
#include <arpa/inet.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <set>

#include "gid.hpp"
#include "shared.hpp"
#include "two_sides.hpp"
#include "wire.hpp"

namespace {

using namespace checks;
namespace verbs = mooncake::verbs;

std::string library;

verbs_double::Fabric& fabric() {
  static auto* mapped = [] {
    int fd = open((library + ".fabric").c_str(), O_RDWR);
    void* at = mmap(nullptr, sizeof(verbs_double::Fabric), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    require(fd >= 0 && at != MAP_FAILED, "the double's network is a file");
    return static_cast<verbs_double::Fabric*>(at);
  }();
  return *mapped;
}

Options on(const char* device) { return {{"library", library}, {"device", device}}; }

verbs::GidCandidate candidate(const char* text, int index, uint32_t type, const char* interface) {
  verbs::GidCandidate made{{}, index, type, interface};
  require(inet_pton(AF_INET6, text, made.gid.raw) == 1, text);
  return made;
}

void check_gid() {
  using verbs::ibv::kGidRoceV1, verbs::ibv::kGidRoceV2;
  std::vector<verbs::GidCandidate> all = {
      candidate("::", 0, kGidRoceV2, ""),
      candidate("fe80::1", 1, kGidRoceV1, "eth0"),
      candidate("fe80::1", 2, kGidRoceV2, "eth0"),
      candidate("::ffff:172.17.0.1", 3, kGidRoceV2, "docker0"),
      candidate("::ffff:169.254.3.4", 4, kGidRoceV2, "eth0"),
      candidate("2001:db8::1", 5, kGidRoceV2, "eth0"),
      candidate("::ffff:10.1.2.3", 6, kGidRoceV1, "eth0"),
      candidate("::ffff:10.1.2.3", 7, kGidRoceV2, "eth0"),
      candidate("::ffff:10.1.2.4", 8, kGidRoceV2, "eth0"),
  };
  // Each time the best is taken away, the next best has its turn.
  for (int index : {7, 8, 5, 2, 4, 6, 1, 3}) {
    const verbs::GidCandidate* best = verbs::best_gid(all, true);
    bool tie = best != nullptr && (index == 2 || index == 4) && (best->index == 2 || best->index == 4);
    require(best != nullptr && (best->index == index || tie), "the best address is chosen");
    all.erase(all.begin() + (best - all.data()));
  }
  require(verbs::best_gid(all, true) == nullptr, "the empty address is never chosen");
}

// Messages that a peer may send are taken or refused, and never believed where they contradict themselves.
void check_wire() {
  verbs::ImportAnswer good;
  good.iova = 1 << 30, good.length = 10'000, good.chunk_shift = 12, good.access = 3, good.rkeys = {1, 2, 3};
  std::string whole = encode(good).substr(verbs::kHeaderBytes);
  verbs::ImportAnswer read;
  require(decode(whole, read) && read.rkeys == good.rkeys && read.length == good.length,
          "what is sent is read");
  for (size_t length = 0; length + 1 < whole.size(); ++length)
    require(!decode(std::string_view(whole).substr(0, length), read), "half a message is none");
  for (auto change :
       {+[](verbs::ImportAnswer& a) { a.length = 0; }, +[](verbs::ImportAnswer& a) { a.length = 20'000; },
        +[](verbs::ImportAnswer& a) { a.chunk_shift = 64; }, +[](verbs::ImportAnswer& a) { a.iova = ~0ull; },
        +[](verbs::ImportAnswer& a) { a.status = 77; }}) {
    verbs::ImportAnswer bad = good;
    change(bad);
    require(!decode(encode(bad).substr(verbs::kHeaderBytes), read),
            "an answer that makes no sense is refused");
  }
  verbs::Greeting greeting;
  greeting.mtu = 9, greeting.rd_atomic = 1;
  require(!decode(encode(verbs::Message::kHello, greeting).substr(verbs::kHeaderBytes), greeting),
          "an MTU that there is not is refused");
}

constexpr size_t kBytes = 1 << 20;

std::vector<uint32_t> fetch_numbers(Side& side) {
  std::vector<mc_notice> notices(7);
  size_t count = 0;
  require(table->poll_notices(side.endpoint, notices.data(), notices.size(), &count) == MC_OK,
          "poll_notices");
  std::vector<uint32_t> numbers;
  for (size_t i = 0; i < count; ++i) {
    require(notices[i].length == sizeof(uint32_t) + notices[i].data[0] % 100, "a notice has its length");
    uint32_t number;
    std::memcpy(&number, notices[i].data, sizeof number);
    numbers.push_back(number);
  }
  return numbers;
}

// Each of many comes once, after the bytes of the write before it, also while nobody fetches for a while.
void check_notices() {
  constexpr uint32_t kCount = 300;
  Side source(on("double0"), kBytes, 1), target(on("double1"), kBytes, 2);
  source.meet(target, 2);
  std::set<uint32_t> come;
  uint32_t written = 0, sent = 0, told = 0;
  for (uint64_t until = now_ns() + kDeadlineNs; come.size() < kCount;) {
    require(now_ns() < until, "all notices come in time");
    for (; sent < kCount; ++sent) {
      // Its bytes are at a place of its own, and large enough to go over several queue pairs.
      std::memcpy(&source.memory[sent * 1024], &sent, sizeof sent);
      uint8_t data[MC_NOTICE_MAX] = {};
      std::memcpy(data, &sent, sizeof sent);
      size_t length = sizeof sent + data[0] % 100;
      if (table->notify(source.endpoint, source.connection, "probe", 0, 0) == MC_OK) std::exit(1);
      for (; written <= sent; ++written) source.submit(source.op(MC_WRITE, sent * 1024, 1024, 2 * sent));
      mc_status status = table->notify(source.endpoint, source.connection, data, length, 2 * sent + 1);
      if (status == MC_AGAIN) break;
      require(status == MC_OK, "a notice is accepted");
    }
    mc_completion done[64];
    size_t count = 0;
    require(table->poll(source.endpoint, done, 64, &count) == MC_OK, "poll");
    for (size_t i = 0; i < count; ++i) {
      require(done[i].status == MC_OK, done[i].reason);
      told += done[i].cookie % 2;
      require(done[i].cookie % 2 == 0 || done[i].bytes == 0, "a notice moves no bytes");
    }
    if (told < 8) continue;  // so many wait at the target, and the others at the source
    for (uint32_t number : fetch_numbers(target)) {
      require(come.insert(number).second, "no notice comes twice");
      require(std::memcmp(&target.memory[number * 1024], &number, sizeof number) == 0,
              "the bytes of the write before a notice are there");
    }
  }
  require(fetch_numbers(target).empty(), "and no other");
}

// A notice after a write that was refused is not delivered, and says why.
void check_failed_notice() {
  Side source(on("double0"), kBytes, 1), target(on("double1"), kBytes / 2, 2);
  source.meet(target, 2);
  source.submit(source.op(MC_WRITE, kBytes / 2, 4096, 1));  // outside
  require(table->notify(source.endpoint, source.connection, "never", 5, 2) == MC_OK, "it is accepted");
  bool failed = false;
  for (int i = 0; i < 2; ++i) {
    mc_completion done = source.wait();
    require(done.status != MC_OK && (done.cookie == 2 || done.status == MC_REFUSED), "both fail");

    failed |= done.cookie == 2 && std::strstr(done.reason, "before the notice") != nullptr;
  }
  require(failed, "the notice says that it was the write");
  require(table->notify(source.endpoint, source.connection, "\4xxxyyyy", 8, 3) == MC_OK, "another one");
  require(source.wait().status == MC_OK, "is delivered");
  mc_notice notices[4];
  size_t count = 0;
  require(table->poll_notices(target.endpoint, notices, 4, &count) == MC_OK && count == 1, "alone");
}

size_t queue_pairs_of(uint32_t device) {
  size_t count = 0;
  for (const auto& qp : fabric().qps) count += qp.number != 0 && qp.device == device && qp.pid == getpid();
  return count;
}

// After a write was lost, the token ends the target's queue pairs, and the next operation makes new ones.
void check_fence() {
  Side source(on("double0"), kBytes, 1), target(on("double1"), kBytes, 2);
  source.meet(target, 2);
  uint8_t token[MC_BLOB_MAX];
  size_t length = sizeof token;
  source.submit(source.op(MC_WRITE, 0, kBytes, 1));
  require(source.wait().status == MC_OK, "a write arrives");
  require(table->late_writes(source.endpoint, source.connection, token, &length) == MC_OK && length == 0,
          "nothing is late");
  fabric().frozen[1] = 0;
  fabric().down[1] = 1;
  source.submit(source.op(MC_WRITE, 0, kBytes, 2));
  require(source.wait().status == MC_UNREACHABLE, "a write to a port without link is lost");
  // The control socket is alive: the peer ends what is left, and late_writes() is empty by itself.
  for (uint64_t until = now_ns() + kDeadlineNs;;) {
    require(now_ns() < until, "nothing is late any more");
    length = sizeof token;
    require(table->late_writes(source.endpoint, source.connection, token, &length) == MC_OK, "late_writes");
    if (length == 0) break;
    require(table->fence(target.endpoint, token, length, now_ns() + kDeadlineNs) == MC_OK, "fence");
    require(queue_pairs_of(1) == 0, "fence() has ended the target's queue pairs");
  }
  require(queue_pairs_of(1) == 0, "the target keeps no queue pair");
  require(table->fence(target.endpoint, token, 5, now_ns()) == MC_INVALID, "five bytes are no token");
  fabric().down[1] = 0;
  std::memset(source.memory.data(), 9, kBytes);
  source.submit(source.op(MC_WRITE, 0, kBytes, 3));
  require(source.wait().status == MC_OK, "the next write connects anew");
  require(target.memory == source.memory, "and its bytes are there");
}

// Memory in three chunks, and one within another: every byte arrives over the edges.
void check_chunks() {
  Options chunked = on("double0");
  chunked.push_back({"chunk_bytes", std::to_string(1 << 20)});
  constexpr size_t kLarge = (5 << 19) + 4321;
  Side source(chunked, kLarge, 1), target(chunked, kLarge, 2);
  source.meet(target, 2);
  for (size_t i = 0; i < kLarge; ++i) source.memory[i] = static_cast<uint8_t>(i * 7 + i / 256);
  source.submit(source.op(MC_WRITE, 3, kLarge - 3, 1));
  require(source.wait().status == MC_OK, "a write over three chunks");
  require(std::memcmp(&source.memory[3], &target.memory[3], kLarge - 3) == 0 && target.memory[2] == 0,
          "arrives whole and alone");
  mc_memory inner{};
  inner.struct_size = sizeof inner;
  inner.fd = -1;
  inner.address = reinterpret_cast<uint64_t>(&source.memory[1 << 19]);
  inner.length = 1 << 20;
  inner.region_id = 3;
  mc_handle region = 0;
  require(table->register_memory(source.endpoint, &inner, &region) == MC_OK, "memory within other memory");
  std::memset(&source.memory[1 << 19], 5, 1 << 20);
  source.submit({MC_WRITE, 0, source.connection, region, source.remote, 0, 0, 1 << 20, 2});
  require(source.wait().status == MC_OK, "is written from");
  require(target.memory[0] == 5 && target.memory[(1 << 20) - 1] == 5, "by the same registration");
  require(table->deregister_memory(source.endpoint, region, now_ns() + kDeadlineNs) == MC_OK,
          "and given back");
}

// More peers than may have queue pairs: idle ones lose theirs, and get new ones when they are used again.
void check_sweep() {
  Options small = on("double0");
  small.push_back({"max_connections", "2"});
  Side source(small, kBytes, 1);
  constexpr size_t kPeers = 5;
  std::vector<std::unique_ptr<Side>> targets;
  std::vector<std::pair<mc_handle, mc_handle>> met;
  for (size_t i = 0; i < kPeers; ++i) {
    targets.push_back(std::make_unique<Side>(on("double1"), 4096, 10 + i));
    source.meet(*targets.back(), 10 + i);
    met.push_back({source.connection, source.remote});
  }
  for (int round = 0; round < 3; ++round) {
    for (size_t i = 0; i < kPeers; ++i) {
      std::memset(source.memory.data(), static_cast<int>(10 * round + i), 4096);
      source.submit({MC_WRITE, 0, met[i].first, source.region, met[i].second, 0, 0, 4096, i});
      mc_completion done = source.wait();
      require(done.status == MC_OK, done.reason);
      require(targets[i]->memory[17] == 10 * round + i, "each peer is written to, again and again");
    }
  }
  mc_stats stats{};
  for (uint64_t until = now_ns() + kDeadlineNs;;) {
    stats.struct_size = sizeof stats;
    require(table->stats(source.endpoint, &stats) == MC_OK, "stats");
    if (stats.connections <= 2) break;
    require(now_ns() < until, "no more than two have queue pairs");
  }
}

}  // namespace

int main(int count, char** arguments) {
  require(count == 3, "usage: checks LIBRARY NAME");
  library = arguments[1];
  std::string name = arguments[2];
  constexpr std::pair<const char*, void (*)()> kAll[] = {
      {"gid", check_gid},         {"wire", check_wire},
      {"notices", check_notices}, {"failed_notice", check_failed_notice},
      {"fence", check_fence},     {"chunks", check_chunks},
      {"sweep", check_sweep},
  };
  for (const auto& [known, check] : kAll) {
    if (name == known) return check(), 0;
  }
  return 2;
}
