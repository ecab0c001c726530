// Malformed PDUs against the NVMe/TCP initiator, and threads that read, write, cancel and revoke files at the
// same time, also those of an owner that is reached as if it were another process, all without Python. Usage:
// nvmeof_fuzz SECONDS SEED
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "abi.hpp"
#include "crc32c.hpp"
#include "host.hpp"
#include "nvme_queue.hpp"

namespace {

using namespace mooncake::nvmeof;
using namespace mooncake::nvmeof::nvme;

void require(bool so, const char* what) {
  if (so) return;
  std::fprintf(stderr, "not so: %s (%s)\n", what, driver_table()->last_error());
  std::abort();
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// ---- the initiator's parser

constexpr uint32_t kLength = 8192;
constexpr uint16_t kDepth = 8;

// What a target may send: right in most fields, and wrong in some.
std::string some_pdu(std::mt19937_64& random, uint8_t digests) {
  auto pick = [&](std::initializer_list<uint32_t> of) { return *(of.begin() + random() % of.size()); };
  bool odd = random() % 3 == 0;
  Data body{};
  auto type = static_cast<uint8_t>(pick({kCapsuleResp, kC2hData, kC2hData, kR2t, kC2hTermReq}));
  if (odd && random() % 4 == 0) type = static_cast<uint8_t>(random());
  uint32_t head = sizeof body + ((digests & kHeaderDigest) != 0 ? 4 : 0);
  uint32_t length = type == kC2hData ? pick({1, 4, 512, 4096, 5000}) : 0;
  body.command = static_cast<uint16_t>(odd ? pick({0, 7, 8, 9, 65535}) : random() % kDepth);
  body.offset = odd ? pick({0, 4096, 8191, 8192, 1u << 31, ~0u}) : pick({0, 0, 512, 3192});
  body.length = odd ? pick({0, length, 8192, ~0u}) : length;
  if (type == kR2t) body.length = pick({512, 4096, kLength});
  bool with_digest = length > 0 && (digests & kDataDigest) != 0;
  body.header.type = type;
  body.header.flags =
      static_cast<uint8_t>((digests & kHeaderDigest) | (with_digest ? kDataDigest : 0) |
                           (random() % 2 ? kLastPdu : 0) | (random() % 4 == 0 ? kSuccess : 0));
  body.header.header_length = sizeof body;
  body.header.data_offset = static_cast<uint8_t>(length > 0 ? head : 0);
  body.header.length = head + length + (with_digest ? 4 : 0);
  if (odd && random() % 2) body.header.length = pick({0, 7, 24, 25, ~0u});
  if (odd && random() % 4 == 0) body.header.header_length = static_cast<uint8_t>(random());
  if (odd && random() % 4 == 0) body.header.data_offset = static_cast<uint8_t>(random());
  if (type == kCapsuleResp) {
    Response response{body.header, {0, 0, 0, static_cast<uint16_t>(body.command), 0}};
    if (random() % 4 == 0) response.result.status = static_cast<uint16_t>(random());
    std::memcpy(&body, &response, sizeof body);
  }
  std::string out(reinterpret_cast<const char*>(&body), sizeof body);
  auto add = [&](uint32_t digest) { out.append(reinterpret_cast<const char*>(&digest), 4); };
  if (head > sizeof body && type != kC2hTermReq) add(crc32c(0, &body, sizeof body) ^ (random() % 50 == 0));
  std::string data(length, static_cast<char>(random()));
  out += data;
  if (with_digest) add(crc32c(0, data.data(), data.size()) ^ (random() % 50 == 0));
  if (odd && random() % 8 == 0) out.resize(random() % (out.size() + 1));
  return out;
}

uint64_t fuzz_connection(std::mt19937_64& random) {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
  UniqueFd far(ends[1]);
  auto digests = static_cast<uint8_t>(random() % 4);
  Queue queue;
  queue.adopt(UniqueFd(ends[0]), kDepth, digests, 4096);
  queue.set_in_capsule(random() % 2 ? 4096 : 0);
  struct One {
    Command command;
    std::vector<std::byte> memory = std::vector<std::byte>(kLength);
    bool running = false;
  };
  std::vector<One> all(kDepth);
  std::vector<char> sink(1 << 16);
  Status status;
  uint64_t sent = 0;
  while (status.ok() && sent < 400) {
    for (One& one : all) {
      if (one.running || queue.full() || !status.ok()) continue;
      one.command = Command{};
      one.command.to_target = random() % 2 != 0;
      one.command.entry.opcode = one.command.to_target ? kWriteBlocks : kReadBlocks;
      one.command.memory = one.memory.data();
      one.command.length = random() % 2 ? kLength : 4096;
      one.running = true;
      status = queue.start(one.command);
    }
    std::string pdu = some_pdu(random, digests);
    for (size_t at = 0; at < pdu.size() && status.ok();) {
      size_t part = random() % 4 == 0 ? 1 + random() % (pdu.size() - at) : pdu.size() - at;
      ssize_t taken = send(far.get(), pdu.data() + at, part, MSG_NOSIGNAL);
      if (taken > 0) at += static_cast<size_t>(taken);
      std::vector<Command*> over;
      status = queue.receive(over);
      for (One& one : all) {
        for (Command* each : over) one.running = one.running && each != &one.command;
      }
      while (recv(far.get(), sink.data(), sink.size(), 0) > 0) continue;
      if (status.ok()) status = queue.flush();
    }
    ++sent;
  }
  std::vector<Command*> lost;
  queue.abandon(lost);
  size_t running = 0;
  for (One& one : all) running += one.running;
  require(lost.size() == running, "every command ends once");
  return sent;
}

// ---- files

constexpr size_t kBytes = 1 << 20;
const mc_driver_v1* const table = driver_table();
const uint8_t kKey[MC_KEY_BYTES] = {1, 2, 3};

mc_handle enroll(mc_handle endpoint, mc_memory_kind kind, void* address, int fd, uint64_t id) {
  mc_memory what{};
  what.struct_size = sizeof what;
  what.kind = kind;
  what.fd = fd;
  what.address = reinterpret_cast<uint64_t>(address);
  what.length = kBytes;
  what.region_id = id;
  std::memcpy(what.key, kKey, sizeof kKey);
  mc_handle made = 0;
  require(table->register_memory(endpoint, &what, &made) == MC_OK, "registered");
  return made;
}

// Memory of its own for each: two that move the same bytes at once would be a race of the test.
mc_op some_op(std::mt19937_64& chance, uint64_t thread, int number, mc_handle connection, mc_handle local,
              mc_handle remote) {
  mc_op op{};
  op.opcode = chance() % 2 ? MC_READ : MC_WRITE;
  op.connection = connection;
  op.local = local;
  op.remote = remote;
  op.length = chance() % 3 ? 4096 : 1 + chance() % 9000;
  op.local_offset = thread * (kBytes / 4) + static_cast<uint64_t>(number) * 12288;
  op.remote_offset = op.length == 4096 ? chance() % 200 * 4096 : chance() % 900000;
  op.cookie = chance() % 16;
  return op;
}

enum class Peer { kNear, kFar };

// The endpoint that owns the files; a far one is not found in this process, and asked through its socket.
mc_handle open_owner(const char* io, Peer peer, char* address, size_t* length) {
  mc_option option{"io", io};
  mc_handle owner = 0;
  require(table->open(&option, 1, &owner) == MC_OK, "the owner opened");
  require(table->export_address(owner, address, length) == MC_OK, "an address");
  EndpointId id;
  std::memcpy(id.data(), address + offsetof(mooncake::driver::Address, name), id.size());
  if (peer == Peer::kFar) withdraw(id);
  return owner;
}

void stress_files(double until, const char* io, uint64_t seed, Peer peer) {
  std::mt19937_64 random(seed);
  mc_option options[] = {{"io", io}, {"workers", "3"}, {"queue_depth", "64"}};
  mc_handle endpoint = 0;
  mc_status opened = table->open(options, 3, &endpoint);
  if (opened == MC_UNSUPPORTED) return;  // io_uring is forbidden here
  require(opened == MC_OK, "opened");
  char path[] = "/tmp/nvmeof-stress-XXXXXX";
  int fd = mkstemp(path);
  require(fd >= 0 && unlink(path) == 0 && ftruncate(fd, kBytes) == 0, "a file");
  std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(4096, kBytes), std::free);
  std::memset(memory.get(), 7, kBytes);
  char address[MC_BLOB_MAX];
  size_t length = sizeof address;
  mc_handle connection = 0;
  mc_handle owner = open_owner(io, peer, address, &length);
  require(table->connect(endpoint, address, length, &connection) == MC_OK, "connected");
  mc_handle local = enroll(endpoint, MC_DRAM, memory.get(), -1, 1);
  std::atomic<uint64_t> submitted{0}, ended{0};
  std::atomic<bool> over{false};
  auto worker = [&](uint64_t own) {
    std::mt19937_64 chance(own);
    for (uint64_t round = 0; seconds_now() < until; ++round) {
      uint64_t id = own << 32 | (round + 2);
      mc_handle file = enroll(owner, MC_FILE, nullptr, fd, id), remote = 0;
      char blob[MC_BLOB_MAX];
      size_t size = sizeof blob;
      require(table->export_key(owner, file, blob, &size) == MC_OK, "a key");
      require(table->import_key(endpoint, connection, id, kKey, kBytes, blob, size, &remote) == MC_OK,
              "imported");
      for (int i = 0; i < 20; ++i) {
        mc_op op = some_op(chance, own, i, connection, local, remote);
        size_t accepted = 0;
        mc_status status = table->submit(endpoint, &op, 1, &accepted);
        require(status == MC_OK || status == MC_AGAIN, "submitted");
        submitted += accepted;
        if (chance() % 16 == 0) table->cancel(endpoint, chance() % 16);
      }
      if (chance() % 2) require(table->revoke(owner, file, nullptr, 0) == MC_OK, "revoked");
      mc_status gone = table->deregister_memory(owner, file, now_ns() + 20'000'000'000);
      require(gone == MC_OK, "given back");
      table->release_key(endpoint, remote);
    }
  };
  auto poller = [&] {
    mc_completion completions[32];
    while (!over || ended < submitted) {
      size_t count = 0;
      require(table->poll(endpoint, completions, 32, &count) == MC_OK, "polled");
      ended += count;
      if (count == 0 && table->arm(endpoint) == MC_OK) std::this_thread::yield();
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t i = 0; i < 3; ++i) threads.emplace_back(worker, i);
  std::thread polling(poller);
  for (auto& thread : threads) thread.join();
  over = true;
  polling.join();
  require(ended == submitted, "every operation ended once");
  table->close(endpoint);
  table->close(owner);
  close(fd);
  std::printf("nvmeof %s%s: %lu operations\n", io, peer == Peer::kFar ? ", far" : "",
              static_cast<unsigned long>(ended.load()));
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = argc > 1 ? std::atof(argv[1]) : 3;
  uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : std::random_device{}();
  std::printf("seed %lu\n", static_cast<unsigned long>(seed));
  std::mt19937_64 random(seed);
  uint64_t pdus = 0;
  for (double until = seconds_now() + seconds; seconds_now() < until;) pdus += fuzz_connection(random);
  for (Peer peer : {Peer::kNear, Peer::kFar}) {
    stress_files(seconds_now() + seconds / 4, "io_uring", seed, peer);
    stress_files(seconds_now() + seconds / 4, "threads", seed, peer);
  }
  std::printf("nvmeof: %lu PDUs from a target that is wrong in places\n", static_cast<unsigned long>(pdus));
  return 0;
}
