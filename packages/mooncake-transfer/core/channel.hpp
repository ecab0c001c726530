// Framed requests, answers and notifications between engines over TCP.
//
// One connection serves one direction of asking: who connected sends HELLO, REQUEST and NOTIFY, who accepted
// sends HELLO_ACK, REPLY and ERROR. Bodies are opaque here; the Python side encodes them with msgpack. A
// frame is
//   u32 body length | u8 version | u8 type | u16 method length | u64 request id | method | body     (little
//   endian)
#pragma once

#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "descriptor.hpp"
#include "status.hpp"

namespace mooncake {

// What a connected peer asked, or what became of its connection.
struct Event {
  enum class Kind { kRequest, kNotify, kHello, kLost };
  Kind kind;
  uint64_t connection;
  uint64_t request;
  std::string method;
  std::string body;
};

class Channel {
 public:
  static constexpr size_t kMaxBody = 64u << 20;

  Channel();
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  Status listen(const std::string& host, uint16_t port);
  uint16_t port() const { return port_; }
  // Begins to accept; `hello` is what peers learn about this side.
  Status start(std::string hello);
  void close();

  // Asking side. Both wait at most until the deadline.
  Status connect(const std::string& host, uint16_t port, uint64_t deadline_ns, uint64_t* connection,
                 std::string* hello);
  Status call(uint64_t connection, const std::string& method, const std::string& body, uint64_t deadline_ns,
              std::string* reply, std::string* remote_error);
  Status notify(uint64_t connection, const std::string& method, const std::string& body);
  bool alive(uint64_t connection);
  void disconnect(uint64_t connection);

  // Answering side. Requests may be taken by several threads; everything else comes in order, for one thread.
  // A connection's kLost comes after all its requests have been answered.
  // What the peer at the other end of an incoming connection said in its hello.
  Status hello_of(uint64_t connection, std::string* hello);
  bool next_request(uint64_t deadline_ns, Event* event) { return requests_.pop(deadline_ns, event); }
  bool next_event(uint64_t deadline_ns, Event* event) { return events_.pop(deadline_ns, event); }
  Status reply(uint64_t connection, uint64_t request, bool failed, const std::string& body);

 private:
  struct Call;
  struct Link;
  using LinkPtr = std::shared_ptr<Link>;

  class Queue {
   public:
    void push(Event event);
    bool pop(uint64_t deadline_ns, Event* event);
    void close();

   private:
    std::mutex mutex_;
    std::condition_variable ready_;
    std::deque<Event> events_;
    bool closed_ = false;
  };

  void run();
  void accept_all();
  void add_link(const LinkPtr& link);
  LinkPtr find(uint64_t connection);
  void on_ready(const LinkPtr& link, uint32_t events);
  bool read_frames(const LinkPtr& link);
  bool on_frame(const LinkPtr& link, uint8_t type, uint64_t request, std::string method, std::string body);
  void drop(const LinkPtr& link, const std::string& reason);
  void answered(const LinkPtr& link);
  Status send(const LinkPtr& link, uint8_t type, uint64_t request, const std::string& method,
              const std::string& body);
  Status ask(const LinkPtr& link, uint8_t type, const std::string& method, const std::string& body,
             uint64_t deadline_ns, std::string* reply, std::string* remote_error);
  bool flush(Link& link);  // with the link's mutex held

  Descriptor listener_;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
  uint16_t port_ = 0;
  std::string hello_;
  std::thread loop_;
  const pid_t owner_ = getpid();
  std::atomic<bool> closing_{false};
  std::atomic<uint64_t> next_id_{1};
  std::mutex mutex_;
  std::unordered_map<uint64_t, LinkPtr> links_;
  Queue requests_;
  Queue events_;
};

}  // namespace mooncake
