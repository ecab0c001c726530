// A set of watched descriptors: an epoll, and who is told about each.
#pragma once

#include <sys/epoll.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "descriptor.hpp"
#include "region.hpp"
#include "status.hpp"

namespace mooncake_tcp {

// Something with a descriptor in a poller. What belongs to a worker is only called on that worker's thread.
class Watched {
 public:
  virtual ~Watched() = default;
  // `events` is 0 after Worker::again().
  virtual void on_events(uint32_t events) = 0;
  virtual void on_deadline() {}
  // Some key was revoked: stop using memory under revoked ones wherever the wire format allows it.
  virtual void on_revoked() {}
  // Stop what this region's revoked keys still allow, whatever it takes.
  virtual void on_abort(const Region&) {}
  // The worker ends.
  virtual void on_stop() = 0;
};

// From any thread, also while another one waits.
class Poller {
 public:
  Status open();
  // Readable when something watched is ready; may be watched itself.
  int fd() const { return epoll_.get(); }

  // `owner` keeps `watched` alive; returns a token, 0 on failure (errno). A null `watched` is only waited
  // for.
  uint64_t watch(int fd, uint32_t events, Watched* watched, std::shared_ptr<void> owner);
  void change(uint64_t token, int fd, uint32_t events);
  void forget(uint64_t token, int fd);

  int wait(epoll_event* events, int most, int timeout_ms) const;
  // False, and nothing, when the token is forgotten: an earlier event of the same round may have ended the
  // object.
  bool dispatch(uint64_t token, uint32_t events);
  // Dispatches what is ready now. False: nothing was, or it is only waited for.
  bool progress();

  struct Entry {
    Watched* watched;
    std::shared_ptr<void> owner;
  };
  std::vector<Entry> entries() const;
  Entry find(uint64_t token) const;

 private:
  Descriptor epoll_;
  mutable std::mutex mutex_;
  uint64_t next_token_ = 1;
  std::unordered_map<uint64_t, Entry> watched_;
};

}  // namespace mooncake_tcp
