// Looks up the name of a host. A resolver takes the time it likes, and getaddrinfo() cannot be stopped.
#pragma once

#include <netdb.h>

#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>

#include "os.hpp"

namespace mooncake::driver {

struct FreeAddresses {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using Addresses = std::unique_ptr<addrinfo, FreeAddresses>;

namespace names {

constexpr int kMostLookups = 16;  // that a resolver leaves without an answer

struct Lookup {
  std::mutex mutex;
  std::condition_variable ended;
  bool done = false;
  int error = EAI_AGAIN;
  Addresses found;
};

inline int ask(const std::string& host, const std::string& port, int flags, Addresses& found) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  int error = getaddrinfo(host.c_str(), port.c_str(), &hints, &list);
  if (error == 0) found.reset(list);
  return error;
}

}  // namespace names

// The stream addresses of a numeric host or of a name. MC_UNREACHABLE says why there are none, or that they
// were not known by the deadline.
inline Status look_up(const std::string& host, const std::string& port, uint64_t deadline_ns,
                      Addresses& found) {
  if (names::ask(host, port, AI_NUMERICHOST, found) == 0) return {};
  std::string what = "cannot look up " + host + ":" + port + ": ";
  auto& open = of_this_process<std::atomic<int>>();
  auto given_up = [&](const std::string& why) {
    --open;
    return failed(MC_UNREACHABLE, what + why);
  };
  if (++open > names::kMostLookups)
    return given_up("the resolver does not answer, and " + std::to_string(names::kMostLookups) +
                    " names wait for it already");
  auto lookup = std::make_shared<names::Lookup>();
  auto task = [lookup, host, port, &open] {
    Addresses addresses;
    int error = names::ask(host, port, 0, addresses);
    std::lock_guard lock(lookup->mutex);
    lookup->error = error;
    lookup->found = std::move(addresses);
    lookup->done = true;
    lookup->ended.notify_all();
    --open;
  };
  try {
    std::thread(task).detach();
  } catch (const std::system_error& error) {
    return given_up(std::string("no thread for it: ") + error.what());
  }
  std::unique_lock lock(lookup->mutex);
  if (!lookup->ended.wait_until(lock, time_point(deadline_ns), [&] { return lookup->done; }))
    return failed(MC_UNREACHABLE, what + "the resolver (see /etc/resolv.conf) gave no answer in time");
  if (lookup->error != 0) return failed(MC_UNREACHABLE, what + gai_strerror(lookup->error));
  found = std::move(lookup->found);
  return {};
}

}  // namespace mooncake::driver
