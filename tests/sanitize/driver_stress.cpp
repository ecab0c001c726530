// Many threads on one endpoint of a driver, as the engine would be and worse: transfers, cancellations,
// regions and keys that come and go, endpoints that end with everything in flight. Usage: NAME SECONDS.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>

#include "driver_endpoint.hpp"

namespace sanitized {
namespace {

constexpr size_t kCell = 8 << 10;
constexpr size_t kCells = 32;
constexpr size_t kPart = kCell * kCells;  // of each thread that moves bytes
constexpr size_t kMovers = 3;
constexpr double kOperationS = 60;  // by when an operation must have ended, however slow the machine

class Stress {
 public:
  Stress(const std::string& driver, double seconds)
      : driver_(driver),
        until_(seconds_from_now(seconds)),
        target_(driver, "target"),
        initiator_(driver, "initiator") {
    target_.add(pages_, &exported_);
    local_ = initiator_.add(local_pages_, &unused_);
    connection_ = initiator_.connect(target_.address());
    remote_ = initiator_.import(connection_, exported_);
  }

  void run() {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kMovers; ++i) threads.emplace_back([this, i] { move(i); });
    threads.emplace_back([this] { use_a_restless_region(); });
    threads.emplace_back([this] { use_keys_that_are_revoked(); });
    threads.emplace_back([this] { be_refused(); });
    threads.emplace_back([this] { come_and_go(); });
    threads.emplace_back([this] { look(); });
    for (std::thread& thread : threads) thread.join();
    check_bytes();
    end_in_flight();
    std::printf("%s: %zu operations, %zu cancelled, %zu refused\n", driver_.c_str(), moved_.load(),
                cancelled_.load(), refused_.load());
  }

 private:
  bool time_left() const { return now_ns() < until_; }

  mc_op make(mc_opcode opcode, mc_handle remote, uint64_t local_offset, uint64_t remote_offset,
             uint64_t length) {
    mc_op op{};
    op.opcode = opcode;
    op.connection = connection_;
    op.local = local_;
    op.remote = remote;
    op.local_offset = local_offset;
    op.remote_offset = remote_offset;
    op.length = length;
    return op;
  }

  static void set(Operations& operations, size_t index, const mc_op& op) {
    uint64_t cookie = operations.ops[index].cookie;
    operations.ops[index] = op;
    operations.ops[index].cookie = cookie;
  }

  void finish(Endpoint& endpoint, Operations& operations) {
    endpoint.submit(operations);
    require(operations.wait(kOperationS), "operations do not end");
  }

  // One operation on its own; what became of it.
  mc_status try_one(const mc_op& op) {
    Operations one(1);
    set(one, 0, op);
    finish(initiator_, one);
    return static_cast<mc_status>(one.slots[0].result.status);
  }

  // Batches of disjoint blocks in this thread's part of both memories; some are cancelled on their way.
  void move(size_t thread) {
    std::mt19937_64 random(thread);
    while (time_left()) {
      Operations batch(1 + random() % kCells);
      for (size_t i = 0; i < batch.ops.size(); ++i) {
        uint64_t at = thread * kPart + i * kCell, length = 1 + random() % (kCell / 2);
        set(batch, i,
            make(random() % 2 ? MC_READ : MC_WRITE, remote_, at + random() % 64, at + random() % 64, length));
      }
      initiator_.submit(batch);
      bool cancels = random() % 4 == 0;
      if (cancels)
        initiator_.table().cancel(initiator_.handle(), batch.ops[random() % batch.ops.size()].cookie);
      require(batch.wait(kOperationS), "a batch does not end");
      for (const Slot& slot : batch.slots) {
        int status = slot.result.status;
        require(status == MC_OK || (cancels && status == MC_CANCELLED),
                "an operation failed: " + std::to_string(status) + " " + slot.result.reason);
        ++(status == MC_OK ? moved_ : cancelled_);
      }
    }
  }

  // A region of the target that is registered anew all the time: its operations are done or refused.
  void use_a_restless_region() {
    Pages pages(64 << 10);
    Pages place(64 << 10);
    Exported unused;
    mc_handle local = initiator_.add(place, &unused);
    while (time_left()) {
      Exported exported;
      mc_handle region = target_.add(pages, &exported);
      mc_handle remote = initiator_.import(connection_, exported);
      Operations reads(8);
      for (size_t i = 0; i < 8; ++i) {
        set(reads, i, make(MC_READ, remote, i * kCell, i * kCell, kCell));
        reads.ops[i].local = local;
      }
      initiator_.submit(reads);
      check(target_.table().deregister_memory(target_.handle(), region, seconds_from_now(kOperationS)),
            target_, "deregister_memory");
      require(reads.wait(kOperationS), "reads of a closed region do not end");
      for (const Slot& slot : reads.slots) require_done_or_refused(slot);
      initiator_.table().release_key(initiator_.handle(), remote);
    }
  }

  void require_done_or_refused(const Slot& slot) {
    int status = slot.result.status;
    // A peer that is cut off in the middle of an answer shows as unreachable.
    require(status == MC_OK || status == MC_REFUSED || status == MC_UNREACHABLE,
            std::string("neither done nor refused: ") + slot.result.reason);
    refused_ += status != MC_OK;
  }

  // Keys of lesser rights: what they do not allow is refused, and all of it once they are revoked.
  void use_keys_that_are_revoked() {
    if (target_.table().abi_minor < 1 || target_.table().grant == nullptr) return;
    Pages pages(kPart);
    Pages place(kPart);
    Exported exported, unused;
    mc_handle region = target_.add(pages, &exported);
    mc_handle local = initiator_.add(place, &unused);
    for (unsigned round = 0; time_left(); ++round) {
      Exported granted = exported;
      granted.key = Key::random();
      bool reads = round % 2 == 0;
      granted.blob.resize(MC_BLOB_MAX);
      size_t length = granted.blob.size();
      check(target_.table().grant(target_.handle(), region, granted.key.bytes,
                                  reads ? MC_ACCESS_READ : MC_ACCESS_WRITE, granted.blob.data(), &length),
            target_, "grant");
      granted.blob.resize(length);
      mc_handle remote = initiator_.import(connection_, granted);
      mc_op allowed = make(reads ? MC_READ : MC_WRITE, remote, 0, 0, kCell);
      mc_op forbidden = make(reads ? MC_WRITE : MC_READ, remote, 0, 0, kCell);
      allowed.local = forbidden.local = local;
      require(try_one(allowed) == MC_OK, "what a key allows is not done");
      require(try_one(forbidden) == MC_REFUSED, "what a key does not allow is done");
      uint64_t deadline = round % 4 < 2 ? 0 : seconds_from_now(kOperationS);
      check(target_.table().revoke(target_.handle(), region, granted.key.bytes, deadline), target_, "revoke");
      require(try_one(allowed) == MC_REFUSED, "a revoked key still works");
      initiator_.table().release_key(initiator_.handle(), remote);
      refused_ += 2;
    }
  }

  // Wrong keys, regions that never were, ranges beyond the end that a forged length lets pass.
  void be_refused() {
    Exported wrong = exported_, unknown = exported_, longer = exported_;
    wrong.key.bytes[5] ^= 1;
    unknown.region_id += 1'000'000;
    longer.length = ~uint64_t{0};
    mc_handle remotes[] = {initiator_.import(connection_, wrong), initiator_.import(connection_, unknown),
                           initiator_.import(connection_, longer)};
    uint64_t beyond[] = {pages_.size - 1, pages_.size, ~uint64_t{0} - 2, ~uint64_t{0} - 4095};
    while (time_left()) {
      for (mc_opcode opcode : {MC_READ, MC_WRITE}) {
        for (mc_handle remote : remotes) {
          for (uint64_t offset : beyond) {
            uint64_t at = remote == remotes[2] ? offset : 0;
            // A place of its own: the target might be written to, if it were not refused.
            mc_status status = try_one(make(opcode, remote, kMovers * kPart, at, 2));
            require(status == MC_REFUSED, "what must be refused ended as " + std::to_string(status));
            ++refused_;
          }
        }
      }
    }
  }

  // Initiators that come and go, half of them with operations in flight.
  void come_and_go() {
    for (unsigned round = 0; time_left(); ++round) {
      Pages pages(kPart);
      Operations reads(16);
      {
        Endpoint visitor(driver_, "visitor");
        Exported unused;
        mc_handle local = visitor.add(pages, &unused);
        mc_handle connection = visitor.connect(target_.address());
        mc_handle remote = visitor.import(connection, exported_);
        // Behind the parts of the threads that move: nobody writes there.
        for (size_t i = 0; i < reads.ops.size(); ++i) {
          mc_op op = make(MC_READ, remote, i * kCell, kMovers * kPart + kCell, kCell);
          op.connection = connection;
          op.local = local;
          set(reads, i, op);
        }
        visitor.submit(reads);
        if (round % 3 == 0) require(reads.wait(kOperationS), "a visitor's reads do not end");
        if (round % 3 == 1) visitor.table().disconnect(visitor.handle(), connection);
      }
    }
  }

  void look() {
    while (time_left()) {
      mc_stats stats{};
      stats.struct_size = sizeof stats;
      check(initiator_.table().stats(initiator_.handle(), &stats), initiator_, "stats");
      mc_caps caps{};
      caps.struct_size = sizeof caps;
      check(target_.table().caps(target_.handle(), &caps), target_, "caps");
      require(caps.memory_kinds >> MC_DRAM & 1, "it takes no memory of the host");
      require(caps.alignment != 0 && (caps.alignment & (caps.alignment - 1)) == 0,
              "alignment is no power of two");
      require(caps.bandwidth_bytes_per_s != 0 && caps.latency_ns != 0, "it claims no bandwidth or latency");
      require(caps.in_flight_bytes == 0 || caps.in_flight_bytes >= caps.inline_bytes,
              "its window is too small");
      require(initiator_.table().poll(0, nullptr, 0, nullptr) != MC_OK,
              "an endpoint that never was is polled");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void check_bytes() {
    for (size_t i = 0; i < kPart; ++i) local_pages_.bytes[i] = static_cast<char>(i * 7);
    require(try_one(make(MC_WRITE, remote_, 0, 0, kPart)) == MC_OK, "the last write");
    require(try_one(make(MC_READ, remote_, kPart, 0, kPart)) == MC_OK, "the last read");
    require(std::memcmp(local_pages_.bytes, local_pages_.bytes + kPart, kPart) == 0, "the bytes differ");
  }

  void end_in_flight() {
    // Outlives the endpoint: completions that it still hands out find their slots.
    in_flight_ = std::make_unique<Operations>(kCells);
    for (size_t i = 0; i < kCells; ++i) {
      set(*in_flight_, i, make(MC_WRITE, remote_, i * kCell, i * kCell, kCell));
    }
    initiator_.submit(*in_flight_);
    initiator_.close();
    std::memset(local_pages_.bytes, 1, local_pages_.size);  // nobody uses it any more
    target_.close();
    std::memset(pages_.bytes, 2, pages_.size);
  }

  const std::string driver_;
  const uint64_t until_;
  Pages pages_{(kMovers + 1) * kPart};
  Pages local_pages_{(kMovers + 1) * kPart};
  std::unique_ptr<Operations> in_flight_;
  Endpoint target_, initiator_;
  Exported exported_, unused_;
  mc_handle local_ = 0, connection_ = 0, remote_ = 0;
  std::atomic<size_t> moved_{0}, cancelled_{0}, refused_{0};
};

}  // namespace
}  // namespace sanitized

int main(int count, char** words) {
  sanitized::require(count == 3, "usage: driver_stress NAME SECONDS");
  sanitized::Stress(words[1], std::strtod(words[2], nullptr)).run();
  return 0;
}
