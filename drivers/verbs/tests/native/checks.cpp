// What can only be said of the core from C++: which address it chooses, that notices keep their promises, and
// what fence() ends. `checks LIBRARY NAME` runs one and ends with 0, or says what is not so.
#include <arpa/inet.h>
#include <sys/mman.h>
#include <unistd.h>

#include "control_checks.hpp"
#include "gid.hpp"
#include "memory_checks.hpp"
#include "notice_checks.hpp"
#include "pace_checks.hpp"
#include "wire.hpp"

namespace {

using namespace checks;
namespace verbs = mooncake::verbs;

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
  greeting.mtu = 3, greeting.ring_iova = 4096, greeting.ring_rkey = 5, greeting.ring_slots = 8;
  whole = encode(verbs::Message::kWelcome, greeting).substr(verbs::kHeaderBytes);
  verbs::Greeting told;
  require(decode(whole, told) && told.ring_rkey == 5 && told.ring_slots == 8, "places for notices are told");
  constexpr size_t kPlaces = 13;
  require(
      decode(std::string_view(whole).substr(0, whole.size() - kPlaces), told = {}) && told.ring_slots == 0,
      "an older peer has none");
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

// fence() waits for a device that takes its time, and no longer than it may.
void check_fence_deadline() {
  Side source(on("double0"), kBytes, 1), target(on("double1"), kBytes, 2);
  source.meet(target, 2);
  fabric().frozen[0] = 1;
  source.submit(source.op(MC_WRITE, 0, kBytes, 1));
  uint8_t token[MC_BLOB_MAX] = {};
  size_t length = sizeof(verbs::Nonce) + sizeof(uint64_t);
  for (uint64_t until = now_ns() + kDeadlineNs; queue_pairs_of(1) == 0;)
    require(now_ns() < until, "the target has queue pairs");
  fabric().sluggish[1] = 1;
  // What the target is to end is named by the write that it does not know to be lost.
  fabric().down[1] = 1;
  fabric().frozen[0] = 0;
  require(source.wait().status == MC_UNREACHABLE, "the write is lost");
  length = sizeof token;
  require(table->late_writes(source.endpoint, source.connection, token, &length) == MC_OK && length > 0,
          "it may still land");
  require(table->fence(target.endpoint, token, length, now_ns() + 20'000'000) == MC_TIMEOUT,
          "fence() gives up");
  fabric().sluggish[1] = 0;
  require(table->fence(target.endpoint, token, length, now_ns() + kDeadlineNs) == MC_OK,
          "and can be repeated");
  require(queue_pairs_of(1) == 0, "the target keeps no queue pair");
  fabric().down[1] = 0;
}

// What is registered may be written in any order, unless that was asked not to be.
size_t registrations(bool relaxed) {
  size_t count = 0;
  for (const auto& mr : fabric().mrs)
    count +=
        mr.key != 0 && mr.pid == getpid() && ((mr.access & verbs::ibv::kRelaxedOrdering) != 0) == relaxed;
  return count;
}

// What the options say of packets and of memory reaches the device.
void check_attributes() {
  Options asked = on("double0");
  for (const char* name : {"traffic_class", "service_level"}) asked.push_back({name, "7"});
  asked.push_back({"mtu", "512"});  // of a port with 1,024
  Side source(asked, kBytes, 1), target(asked, kBytes, 2);
  require(registrations(true) > 0 && registrations(false) == 0, "relaxed ordering");
  source.meet(target, 2);
  source.submit(source.op(MC_WRITE, 0, 64, 1));
  require(source.wait().status == MC_OK, "a write arrives");
  size_t count = 0;
  for (const auto& qp : fabric().qps) {
    if (qp.number == 0 || qp.pid != getpid()) continue;
    require(qp.traffic_class == 7 && qp.service_level == 7, "traffic class and service level");
    require(qp.mtu == 2, "packets of 512 bytes");
    ++count;
  }
  require(count == 4, "of two queue pairs on each side");
  Options strict = on("double0");
  strict.push_back({"relaxed_ordering", "false"});
  Side ordered(strict, kBytes, 3);
  require(registrations(false) > 0, "strict ordering");
}

// Chunks are registered by as many threads as the option says: no fewer, and no more.
void check_parallel_registration() {
  Options asked = on("double0");
  asked.push_back({"chunk_bytes", std::to_string(1 << 20)});
  asked.push_back({"registration_threads", "3"});
  Side side(asked, kBytes, 1);
  std::vector<uint8_t> memory(5 << 20);
  mc_memory what{};
  what.struct_size = sizeof what;
  what.fd = -1;
  what.address = reinterpret_cast<uint64_t>(memory.data());
  what.length = memory.size();
  what.region_id = 2;
  mc_handle region = 0;
  fabric().most_registering = 0;
  fabric().gather = 3;
  require(table->register_memory(side.endpoint, &what, &region) == MC_OK, "memory of five chunks");
  require(fabric().gather == 3, "three registrations were under way at once");
  require(fabric().most_registering == 3, "and never more");
  fabric().gather = 0;
  require(table->deregister_memory(side.endpoint, region, now_ns() + kDeadlineNs) == MC_OK,
          "it is given back");
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

mc_handle register_buffer(const Side& side, int fd, uint64_t offset, uint64_t length, uint64_t id) {
  mc_memory memory{};
  memory.struct_size = sizeof memory;
  memory.kind = MC_CUDA;
  memory.fd = fd;
  memory.fd_offset = offset;
  memory.address = 0x10'0000'0000 + offset;  // of the GPU: nothing is there for the processor
  memory.length = length;
  memory.region_id = id;
  memory.key[0] = 7;
  mc_handle region = 0;
  require(table->register_memory(side.endpoint, &memory, &region) == MC_OK, "a DMA-BUF is registered");
  uint8_t blob[MC_BLOB_MAX];
  size_t size = sizeof blob;
  require(table->export_key(side.endpoint, region, blob, &size) == MC_OK, "its key is exported");
  return region;
}

// Memory of a GPU, by its DMA-BUF: in chunks, on both sides, and never touched by the processor.
void check_dmabuf() {
  Options chunked = on("double0");
  chunked.push_back({"chunk_bytes", std::to_string(1 << 20)});
  constexpr uint64_t kOffset = 4096 + 64, kLarge = (5 << 19) + 4321, kSmall = 64;
  int fd = memfd_create("dmabuf", MFD_CLOEXEC);
  require(fd >= 0 && ftruncate(fd, 2 * kLarge) == 0, "a descriptor that can be mapped");
  Side source(chunked, kLarge, 1), target(chunked, kLarge, 2);
  mc_handle theirs = register_buffer(target, fd, kOffset, kLarge, 3);
  source.meet(target, 2);
  mc_handle remote = source.name(3, kLarge);
  for (size_t i = 0; i < kLarge; ++i) source.memory[i] = static_cast<uint8_t>(i * 7 + i / 256);
  source.submit({MC_WRITE, 0, source.connection, source.region, remote, 0, 0, kLarge, 1});
  require(source.wait().status == MC_OK, "it is written");
  std::vector<uint8_t> held(kLarge);
  require(pread(fd, held.data(), kLarge, kOffset) == kLarge && held == source.memory, "the bytes are in it");
  mc_handle own = register_buffer(source, fd, kOffset, kLarge, 4);
  source.submit({MC_WRITE, 0, source.connection, own, source.remote, kLarge - kSmall, 0, kSmall, 2});
  require(source.wait().status == MC_OK, "a few bytes of it are written elsewhere");
  require(std::memcmp(target.memory.data(), &held[kLarge - kSmall], kSmall) == 0, "and arrive");
  for (auto [side, region] : {std::pair(&target, theirs), std::pair(&source, own)})
    require(table->deregister_memory(side->endpoint, region, now_ns() + kDeadlineNs) == MC_OK, "given back");
  close(fd);
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
      {"gid", check_gid},
      {"wire", check_wire},
      {"notices", check_notices},
      {"failed_notice", check_failed_notice},
      {"fence", check_fence},
      {"chunks", check_chunks},
      {"sweep", check_sweep},
      {"dmabuf", check_dmabuf},
      {"attributes", check_attributes},
      {"parallel_registration", check_parallel_registration},
      {"behind", check_behind},
      {"back_pressure", check_back_pressure},
      {"fence_deadline", check_fence_deadline},
      {"cancelled_before_notice", check_cancelled_before_notice},
      {"revoke_deadline", check_revoke_deadline},
      {"shared_registration", check_shared_registration},
      {"steady_importer", check_steady_importer},
      {"no_descriptor", check_no_descriptor},
      {"tags", check_tags},
      {"pace", check_pace},
      {"adaptive_slices", check_adaptive_slices},
      {"most_queue_pairs", check_most_queue_pairs},
  };
  for (const auto& [known, check] : kAll) {
    if (name != known) continue;
    check();
    bool plain = name == "gid" || name == "wire" || name == "tags" || name == "pace";
    require(plain || fabric().violations == 0, "no rule of verbs was broken");
    return 0;
  }
  return 2;
}
