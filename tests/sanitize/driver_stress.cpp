// Many threads on one endpoint of a driver, as the engine would be and worse: transfers, cancellations,
// regions and keys that come and go, endpoints that end with everything in flight. Usage: NAME SECONDS.
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>

#include "device_memory.hpp"
#include "moving.hpp"

namespace sanitized {
namespace {

constexpr size_t kMovers = 3;

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
    route_ = {&initiator_, connection_, local_, initiator_.import(connection_, exported_)};
  }

  void run() {
    std::vector<std::thread> threads;
    for (size_t i = 0; i < kMovers; ++i)
      threads.emplace_back([this, i] { move_batches(route_, i, until_, counts_); });
    threads.emplace_back([this] { use_a_restless_region(); });
    threads.emplace_back([this] { use_keys_that_are_revoked(); });
    threads.emplace_back([this] { be_refused(); });
    threads.emplace_back([this] { come_and_go(); });
    threads.emplace_back([this] { look(); });
    for (std::thread& thread : threads) thread.join();
    check_bytes(route_, local_pages_);
    end_in_flight();
    std::printf("%s: %zu operations, %zu cancelled, %zu refused\n", driver_.c_str(), counts_.moved.load(),
                counts_.cancelled.load(), counts_.refused.load());
  }

 private:
  bool time_left() const { return now_ns() < until_; }

  // A region of the target that is registered anew all the time: its operations are done or refused.
  void use_a_restless_region() {
    Pages pages(64 << 10, target_.memory());
    Pages place(64 << 10, target_.memory());
    Exported unused;
    mc_handle local = initiator_.add(place, &unused);
    while (time_left()) {
      Exported exported;
      mc_handle region = target_.add(pages, &exported);
      Route route{&initiator_, connection_, local, initiator_.import(connection_, exported)};
      Operations reads(8);
      for (size_t i = 0; i < 8; ++i) set(reads, i, route.op(MC_READ, i * kCell, i * kCell, kCell));
      initiator_.submit(reads);
      take_back(target_, region);
      require(reads.wait(kOperationS), "reads of a closed region do not end");
      for (const Slot& slot : reads.slots) require_done_or_refused(slot);
      initiator_.table().release_key(initiator_.handle(), route.remote);
    }
    take_back(initiator_, local);
  }

  // Before its memory goes.
  static void take_back(Endpoint& endpoint, mc_handle region) {
    uint64_t deadline = seconds_from_now(kOperationS);
    check(endpoint.table().deregister_memory(endpoint.handle(), region, deadline), endpoint,
          "deregister_memory");
  }

  void require_done_or_refused(const Slot& slot) {
    int status = slot.result.status;
    // A peer that is cut off in the middle of an answer shows as unreachable.
    require(status == MC_OK || status == MC_REFUSED || status == MC_UNREACHABLE,
            std::string("neither done nor refused: ") + slot.result.reason);
    counts_.refused += status != MC_OK;
  }

  // Keys of lesser rights: what they do not allow is refused, and all of it once they are revoked.
  void use_keys_that_are_revoked() {
    if (target_.table().abi_minor < 1 || target_.table().grant == nullptr) return;
    Pages pages(kPart, target_.memory());
    Pages place(kPart, target_.memory());
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
      Route route{&initiator_, connection_, local, initiator_.import(connection_, granted)};
      mc_op allowed = route.op(reads ? MC_READ : MC_WRITE, 0, 0, kCell);
      mc_op forbidden = route.op(reads ? MC_WRITE : MC_READ, 0, 0, kCell);
      require(route.try_one(allowed) == MC_OK, "what a key allows is not done");
      require(route.try_one(forbidden) == MC_REFUSED, "what a key does not allow is done");
      uint64_t deadline = round % 4 < 2 ? 0 : seconds_from_now(kOperationS);
      check(target_.table().revoke(target_.handle(), region, granted.key.bytes, deadline), target_, "revoke");
      require(route.try_one(allowed) == MC_REFUSED, "a revoked key still works");
      initiator_.table().release_key(initiator_.handle(), route.remote);
      counts_.refused += 2;
    }
    take_back(initiator_, local);
    take_back(target_, region);
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
            Route route{&initiator_, connection_, local_, remote};
            mc_status status = route.try_one(route.op(opcode, kMovers * kPart, at, 2));
            require(status == MC_REFUSED, "what must be refused ended as " + std::to_string(status));
            ++counts_.refused;
          }
        }
      }
    }
  }

  // Initiators that come and go, half of them with operations in flight.
  void come_and_go() {
    for (unsigned round = 0; time_left(); ++round) {
      Pages pages(kPart, target_.memory());
      Operations reads(16);
      {
        Endpoint visitor(driver_, "visitor");
        Exported unused;
        mc_handle local = visitor.add(pages, &unused);
        mc_handle connection = visitor.connect(target_.address());
        Route route{&visitor, connection, local, visitor.import(connection, exported_)};
        // Behind the parts of the threads that move: nobody writes there.
        for (size_t i = 0; i < reads.ops.size(); ++i) {
          set(reads, i, route.op(MC_READ, i * kCell, kMovers * kPart + kCell, kCell));
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
      require(caps.memory_kinds >> pages_.memory.kind & 1, "it does not take the memory that it took");
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

  void end_in_flight() {
    // Outlives the endpoint: completions that it still hands out find their slots.
    in_flight_ = std::make_unique<Operations>(kCells);
    for (size_t i = 0; i < kCells; ++i) {
      set(*in_flight_, i, route_.op(MC_WRITE, i * kCell, i * kCell, kCell));
    }
    initiator_.submit(*in_flight_);
    initiator_.close();
    std::memset(local_pages_.bytes, 1, local_pages_.size);  // nobody uses it any more
    target_.close();
    std::memset(pages_.bytes, 2, pages_.size);
  }

  const std::string driver_;
  const uint64_t until_;
  Pages pages_{(kMovers + 1) * kPart, memory_of(driver_)};
  Pages local_pages_{(kMovers + 1) * kPart, memory_of(driver_)};
  std::unique_ptr<Operations> in_flight_;
  Endpoint target_, initiator_;
  Exported exported_, unused_;
  mc_handle local_ = 0, connection_ = 0;
  Route route_{};
  Counts counts_;
};

}  // namespace
}  // namespace sanitized

int main(int count, char** words) {
  sanitized::require(count == 3, "usage: driver_stress NAME SECONDS");
  sanitized::Stress(words[1], std::strtod(words[2], nullptr)).run();
  sanitized::check_rules_of_doubles();
  return 0;
}
