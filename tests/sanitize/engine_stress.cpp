// The engine's core over fake drivers with several rails that slow down, fail, die and come back, and the
// channel beside it: many threads prepare, post, wait, cancel and close at the same time. Usage: SECONDS.
#include "engine.hpp"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <thread>

#include "channel.hpp"
#include "failing.hpp"
#include "testing/driver.hpp"

namespace sanitized {
namespace {

using mooncake::Block;
using mooncake::Code;
using mooncake::Engine;
using mooncake::Status;

constexpr size_t kPart = 1 << 20;
constexpr size_t kMovers = 3;
constexpr size_t kRails = 3;
constexpr double kTransferS = 60;  // by when a transfer must have ended, however slow the machine

void check(const Status& status, const std::string& what) {
  if (!status.ok()) fail(what + ": " + status.reason);
}

struct Fabric {
  uint64_t number = 0;
  std::shared_ptr<mooncake::fake::Fabric> fabric = mooncake::fake::make_fabric(3, false, &number);
  ~Fabric() { fabric->stop(); }
};

// An engine with a channel, the devices of one host and one region.
class Node {
 public:
  Node(const Fabric& fabric, const std::string& host) : host_(host), memory_((kMovers + 1) * kPart) {
    check(channel_.listen("127.0.0.1", 0, 0), "listen");
    check(channel_.start("hello from " + host), "start of the channel");
    mooncake::RailPolicy policy;
    policy.breaker_pause_ns = policy.suspect_pause_ns = 5'000'000;
    policy.slice_bytes = 64 << 10;
    engine_->set_policy(policy);
    engine_->set_channel(&channel_);
    for (size_t i = 0; i < kRails; ++i) {
      std::string device = "fake" + std::to_string(i);
      check(engine_->add_endpoint(mooncake::fake::driver_table("fake"), "fake", device, -1,
                                  {{"fabric", std::to_string(fabric.number)},
                                   {"device", host + "." + device},
                                   {"queue_ops", i == 0 ? "8" : "0"},
                                   {"inline_bytes", i == 1 ? "4096" : "0"}}),
            "add_endpoint");
    }
    check(engine_->start(), "start of the engine");
    check(add(memory_, "memory", &region_, key_), "register_region");
  }
  ~Node() { close(); }

  void close() {
    engine_->close();
    channel_.close();
  }

  Status add(std::vector<char>& memory, const std::string& name, std::shared_ptr<mooncake::Region>* region,
             uint8_t* key) {
    static std::atomic<uint64_t> last{0};
    mc_memory described{};
    described.kind = MC_DRAM;
    described.fd = -1;
    described.address = reinterpret_cast<uint64_t>(memory.data());
    described.length = memory.size();
    described.region_id = ++last;
    described.numa_node = -1;
    for (size_t i = 0; i < MC_KEY_BYTES; ++i) key[i] = static_cast<uint8_t>(described.region_id * 31 + i);
    std::memcpy(described.key, key, MC_KEY_BYTES);
    return engine_->register_region(described, name, region);
  }

  std::shared_ptr<mooncake::Peer> reach(Node& other) {
    uint64_t connection = 0;
    std::string hello;
    check(channel_.connect("127.0.0.1", other.channel_.port(), seconds_from_now(30), &connection, &hello),
          "connect");
    std::vector<mooncake::DriverBlob> addresses;
    check(other.engine_->export_addresses(&addresses), "export_addresses");
    std::shared_ptr<mooncake::Peer> peer;
    check(engine_->add_peer(other.host_, connection, 1, addresses, &peer), "add_peer");
    return peer;
  }

  std::shared_ptr<mooncake::RemoteRegion> import(const std::shared_ptr<mooncake::Peer>& peer, Node& other) {
    std::vector<mooncake::DriverBlob> keys;
    check(other.engine_->export_keys(*other.region_, &keys), "export_keys");
    std::shared_ptr<mooncake::RemoteRegion> remote;
    check(engine_->import_region(peer, "memory", other.region_->id, other.key_, other.region_->length, keys,
                                 &remote),
          "import_region");
    return remote;
  }

  Engine& engine() { return *engine_; }
  mooncake::Channel& channel() { return channel_; }
  const std::shared_ptr<mooncake::Region>& region() const { return region_; }
  std::vector<char>& memory() { return memory_; }

 private:
  std::string host_;
  std::vector<char> memory_;
  mooncake::Channel channel_;
  std::shared_ptr<Engine> engine_ = std::make_shared<Engine>();
  std::shared_ptr<mooncake::Region> region_;
  uint8_t key_[MC_KEY_BYTES];
};

class Stress {
 public:
  explicit Stress(double seconds) : until_(seconds_from_now(seconds)) {}

  void run() {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kMovers; ++i) threads.emplace_back([this, i] { move(i); });
    threads.emplace_back([this] { meddle(); });
    threads.emplace_back([this] { use_regions_that_close(); });
    threads.emplace_back([this] { look(); });
    threads.emplace_back([this] { ask(); });
    std::thread answering([this] { answer(); });
    for (std::thread& thread : threads) thread.join();
    end_in_flight();
    answering.join();
    std::printf("engine: %zu transfers done, %zu ended otherwise, %zu calls\n", done_.load(), ended_.load(),
                calls_.load());
  }

 private:
  bool time_left() const { return now_ns() < until_; }

  std::shared_ptr<mooncake::Transfer> prepare(mc_opcode opcode,
                                              const std::shared_ptr<mooncake::Region>& local,
                                              const std::vector<Block>& blocks) {
    mooncake::Plan plan;
    check(mooncake::Plan::of_blocks(blocks.data(), blocks.size(),
                                    {local->length, remote_->length(), "local", "remote"}, &plan),
          "plan");
    std::shared_ptr<mooncake::Transfer> transfer;
    check(left_.engine().prepare(opcode, local, remote_, std::move(plan), &transfer), "prepare");
    return transfer;
  }

  // Posts, then waits, cancels, or lets a deadline pass; some transfers are posted again and again.
  void move(size_t thread) {
    std::mt19937_64 random(thread);
    while (time_left()) {
      std::vector<Block> blocks;
      for (size_t i = 0, count = 1 + random() % 40; i < count; ++i) {
        uint64_t at = thread * kPart + i * (kPart / 40);
        blocks.push_back({at, at, random() % (kPart / 40)});
      }
      auto transfer = prepare(random() % 2 ? MC_READ : MC_WRITE, left_.region(), blocks);
      for (int run = 0; run < 4; ++run) post_once(*transfer, random);
    }
  }

  void post_once(mooncake::Transfer& transfer, std::mt19937_64& random) {
    mooncake::PostOptions options;
    options.priority = static_cast<mooncake::Priority>(random() % 3);
    uint64_t kind = random() % 8;
    if (kind == 0) options.deadline_ns = seconds_from_now(0.0005);
    Status posted = left_.engine().post(transfer.shared_from_this(), options);
    check(posted, "post");
    if (kind == 1) left_.engine().cancel(transfer, Status::error(Code::kCancelled, "changed its mind"));
    if (kind == 2) (void)left_.engine().explain(transfer);
    if (kind == 3) left_.engine().wait(transfer, seconds_from_now(0.0001));
    require(left_.engine().wait(transfer, seconds_from_now(kTransferS)), "a transfer does not end");
    Status result = transfer.result();
    bool expected = result.ok() || result.code == Code::kCancelled || result.code == Code::kTimeout ||
                    result.code == Code::kUnreachable || result.code == Code::kIo;
    require(expected, "a transfer ended as nothing makes it end: " + result.reason);
    require(!result.ok() || transfer.bytes_done() == transfer.plan.bytes(),
            "it is done before its bytes are");
    ++(result.ok() ? done_ : ended_);
  }

  // Devices fail, slow down, die and come back. The last one stays good.
  void meddle() {
    std::mt19937_64 random(99);
    while (time_left()) {
      std::string name =
          (random() % 2 ? "left.fake" : "right.fake") + std::to_string(random() % (kRails - 1));
      switch (random() % 4) {
        case 0:
          fabric_.fabric->set_alive(name, false);
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          fabric_.fabric->set_alive(name, true);
          break;
        case 1:
          fabric_.fabric->set_frozen(name, true);
          std::this_thread::sleep_for(std::chrono::milliseconds(2));
          fabric_.fabric->set_frozen(name, false);
          break;
        case 2:
          fabric_.fabric->with_device(name, [](auto& device) { device.behaviour.fail_next = 3; });
          break;
        default:
          double bandwidth = random() % 2 ? 0 : 2e9;
          fabric_.fabric->with_device(name, [&](auto& device) { device.behaviour.bandwidth = bandwidth; });
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(3));
    }
  }

  void use_regions_that_close() {
    std::vector<char> memory(64 << 10);
    while (time_left()) {
      std::shared_ptr<mooncake::Region> region;
      uint8_t key[MC_KEY_BYTES];
      check(left_.add(memory, "restless", &region, key), "register_region");
      auto transfer = prepare(MC_READ, region, {{0, kMovers * kPart, memory.size()}});
      check(left_.engine().post(transfer, {}), "post");
      Status refused = left_.engine().close_region(*region, seconds_from_now(0), true);
      check(left_.engine().close_region(*region, seconds_from_now(kTransferS), false), "close_region");
      std::memset(memory.data(), 1, memory.size());  // nobody else touches it now
      require(left_.engine().wait(*transfer, seconds_from_now(kTransferS)), "a transfer outlives its region");
      ended_ += !refused.ok();
    }
  }

  void look() {
    while (time_left()) {
      for (const auto& peer : left_.engine().peers()) {
        for (const auto& rail : peer->rails()) (void)rail->last_error();
      }
      mooncake::Notice notice;
      left_.engine().notices().pop(seconds_from_now(0.001), &notice);
      left_.engine().progress();
    }
  }

  // ---- the channel

  void ask() {
    uint64_t connection = 0;
    std::string hello, reply, failure;
    auto& channel = left_.channel();
    check(channel.connect("127.0.0.1", right_.channel().port(), seconds_from_now(30), &connection, &hello),
          "connect");
    for (size_t i = 0; time_left(); ++i) {
      std::string body(i % 7 == 0 ? 100'000 : i % 50, 'b');
      check(channel.call(connection, "echo", body, seconds_from_now(kTransferS), &reply, &failure), "call");
      require(reply == body, "an answer is not what was asked");
      check(channel.notify(connection, "note", body, seconds_from_now(kTransferS)), "notify");
      ++calls_;
      if (i % 100 != 99) continue;
      channel.disconnect(connection);
      check(channel.connect("127.0.0.1", right_.channel().port(), seconds_from_now(30), &connection, &hello),
            "connect again");
    }
  }

  void answer() {
    mooncake::Event event;
    while (!over_) {
      while (right_.channel().next_event(now_ns(), &event)) {
      }
      if (!right_.channel().next_request(seconds_from_now(0.02), &event)) continue;
      (void)right_.channel().reply(event.connection, event.request, false, event.body);
    }
  }

  void end_in_flight() {
    for (size_t i = 0; i < kRails; ++i) fabric_.fabric->set_frozen("right.fake" + std::to_string(i), true);
    auto transfer = prepare(MC_WRITE, left_.region(), {{0, 0, kPart}});
    check(left_.engine().post(transfer, {}), "post");
    std::thread waiting([&] { left_.engine().wait(*transfer, seconds_from_now(kTransferS)); });
    std::thread closing([&] { left_.close(); });
    waiting.join();
    closing.join();
    require(transfer->done() && !transfer->ok(), "closing the engine did not end a transfer");
    over_ = true;
  }

  const uint64_t until_;
  Fabric fabric_;
  Node left_{fabric_, "left"}, right_{fabric_, "right"};
  std::shared_ptr<mooncake::Peer> peer_ = left_.reach(right_);
  std::shared_ptr<mooncake::RemoteRegion> remote_ = left_.import(peer_, right_);
  std::atomic<bool> over_{false};
  std::atomic<size_t> done_{0}, ended_{0}, calls_{0};
};

}  // namespace
}  // namespace sanitized

int main(int count, char** words) {
  sanitized::require(count == 2, "usage: engine_stress SECONDS");
  sanitized::Stress(std::strtod(words[1], nullptr)).run();
  return 0;
}
