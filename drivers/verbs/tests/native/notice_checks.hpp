// What notices promise.
#pragma once

#include <cstring>
#include <set>
#include <vector>

#include "fabric.hpp"
#include "queue_pair.hpp"

namespace checks {

inline std::vector<uint32_t> fetch_numbers(Side& side) {
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
inline void check_notices() {
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
inline void check_failed_notice() {
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

inline uint64_t requests() {
  uint64_t counters[4];
  reinterpret_cast<void (*)(uint64_t*)>(symbol("verbs_double_counters"))(counters);
  return counters[1];
}

// A notice goes behind its writes, and does not wait until they are over, while one queue pair has them all.
inline void check_behind() {
  Side source(on("double0"), kBytes, 1), target(on("double1"), kBytes, 2);
  source.meet(target, 2);
  source.submit(source.op(MC_WRITE, 0, 64, 1));
  require(source.wait().status == MC_OK, "a first write connects");
  fabric().frozen[0] = 1;
  uint64_t before = requests();
  source.submit(source.op(MC_WRITE, 0, 4096, 2));
  require(table->notify(source.endpoint, source.connection, "behind", 6, 3) == MC_OK, "a notice is accepted");
  require(requests() == before + 2, "it is with the device, as the write before it is");
  source.submit(source.op(MC_WRITE, 0, kBytes, 4));  // over both queue pairs
  before = requests();
  require(table->notify(source.endpoint, source.connection, "later", 5, 5) == MC_OK, "another is accepted");
  require(requests() == before, "it waits until one queue pair is done");
  fabric().frozen[0] = 0;
  for (uint64_t cookies = 0; cookies < 4; ++cookies) require(source.wait().status == MC_OK, "all arrive");
  mc_notice notices[3];
  size_t count = 0;
  require(table->poll_notices(target.endpoint, notices, 3, &count) == MC_OK && count == 2,
          "and both notices");
}

// A notice after a write of which only a part had been posted when it was cancelled is not delivered.
inline void check_cancelled_before_notice() {
  Options narrow = on("double0");
  narrow.push_back({"window_bytes", "65536"});
  Side source(narrow, kBytes, 1), target(on("double1"), kBytes, 2);
  source.meet(target, 2);
  source.submit(source.op(MC_WRITE, 0, 64, 1));
  require(source.wait().status == MC_OK, "a first write connects");
  fabric().frozen[0] = 1;
  source.submit(source.op(MC_WRITE, 0, kBytes, 2));
  require(table->notify(source.endpoint, source.connection, "never", 5, 3) == MC_OK, "a notice is accepted");
  require(table->cancel(source.endpoint, 2) == MC_OK, "the write is cancelled");
  fabric().frozen[0] = 0;
  for (int i = 0; i < 2; ++i) require(source.wait().status == MC_CANCELLED, "and the notice fails with it");
  mc_notice notice;
  size_t count = 0;
  require(table->poll_notices(target.endpoint, &notice, 1, &count) == MC_OK && count == 0, "nobody is told");
}

// As long as nobody fetches, no more are sent than there are places, and those that wait come later.
inline void check_back_pressure() {
  Side source(on("double0"), kBytes, 1), target(on("double1"), kBytes, 2);
  source.meet(target, 2);
  constexpr uint32_t kSent = 60, kPlaces = 2 * mooncake::verbs::kNoticesPerQp;
  for (uint32_t i = 0; i < kSent; ++i)
    require(table->notify(source.endpoint, source.connection, &i, sizeof i, i) == MC_OK, "it is accepted");
  for (uint32_t done = 0; done < kPlaces; ++done)
    require(source.wait().status == MC_OK, "as many as there are places arrive");
  std::set<uint32_t> come;
  uint32_t done = kPlaces;
  for (uint64_t until = now_ns() + kDeadlineNs; come.size() < kSent || done < kSent;) {
    require(now_ns() < until, "the others follow");
    mc_completion completion;
    size_t count = 0;
    require(table->poll(source.endpoint, &completion, 1, &count) == MC_OK, "poll");
    done += static_cast<uint32_t>(count);
    require(count == 0 || completion.status == MC_OK, completion.reason);
    mc_notice notice;
    require(table->poll_notices(target.endpoint, &notice, 1, &count) == MC_OK, "poll_notices");
    uint32_t number;
    std::memcpy(&number, notice.data, sizeof number);
    require(count == 0 || (notice.length == sizeof number && come.insert(number).second), "each comes once");
  }
}

}  // namespace checks
