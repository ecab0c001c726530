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
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "descriptor.hpp"
#include "forks.hpp"
#include "link.hpp"
#include "mooncake_handler.h"
#include "notices.hpp"
#include "socket.hpp"
#include "spin.hpp"
#include "status.hpp"
#include "support/tls.hpp"

namespace mooncake {

// What a connected peer asked, or what became of its connection.
struct Event {
  // kRefused: a connection that was turned away; `body` says whose and why.
  enum class Kind { kRequest, kNotify, kHello, kLost, kRefused };
  Kind kind;
  uint64_t connection;
  uint64_t request;
  std::string method;
  std::string body;
};

// What no user has a reason to change: none of it is reached by peers that work, and each bounds what one
// that does not can cost. Only `silence_s` is a setting, TransferConfig.peer_timeout_s; tests make the others
// small.
struct ChannelLimits {
  size_t queued_messages = 4096;    // of one connection, received and not yet taken
  size_t queued_bytes = 64u << 20;  // likewise
  size_t unsent_bytes = 16u << 20;  // of one connection: over it, asking and notifying wait for room
  size_t max_answers = 256u << 20;  // unsent bytes at which a peer that does not read its answers is dropped
  size_t ungreeted = 512;           // connections without a hello; one more drops the oldest
  double greeting_s = 10;           // by when a hello must have come
  double silence_s = 15;            // a host that acknowledges nothing for so long is gone
};

class Channel {
 public:
  static constexpr size_t kMaxBody = 64u << 20;

  explicit Channel(ChannelLimits limits = {});
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  // From now on every connection is encrypted and both sides prove who they are; before listen(). With
  // `verify_host` the certificate of an engine that is connected to must be for the host it was looked for
  // at.
  Status use_tls(const tls::Files& files, bool verify_host);
  // Takes the first free port of port..last_port; port 0: any.
  Status listen(const std::string& host, uint16_t port, uint16_t last_port);
  uint16_t port() const { return port_; }
  const Origin& origin() const { return origin_; }
  // Requests of this method are the engine's own: they have a thread that takes no others. Before start().
  void reserve(const std::string& method) { own_methods_.insert(method); }
  // Requests of this method are answered by this handler, which is the caller's and outlives the channel, as
  // soon as they are read. False when the method has one.
  bool serve_compiled(const std::string& method, const mc_handler_v1* handler);
  // Begins to accept; `hello` is what peers learn about this side.
  Status start(std::string hello);
  void close();

  // Asking side. All three wait at most until the deadline; notify() only while more than the limit is
  // unsent.
  Status connect(const std::string& host, uint16_t port, uint64_t deadline_ns, uint64_t* connection,
                 std::string* hello);
  Status call(uint64_t connection, const std::string& method, const std::string& body, uint64_t deadline_ns,
              std::string* reply, std::string* remote_error);
  Status notify(uint64_t connection, const std::string& method, const std::string& body,
                uint64_t deadline_ns);
  // The same without ever waiting, from any thread: kNoMemory while more than the limit is unsent.
  Status try_notify(uint64_t connection, const std::string& method, const std::string& body);
  // Sends a request without a body and returns. `answered` gets the reply, on the channel's thread, with
  // locks held; never, when there is none.
  void ask_later(uint64_t connection, const std::string& method,
                 std::function<void(const std::string& reply)> answered);
  // How many notifications this side has sent over the connection; false when it has ended, or when some wait
  // to be sent.
  bool notified(uint64_t connection, uint64_t* count);
  bool alive(uint64_t connection);
  void disconnect(uint64_t connection);

  // Answering side. Requests may be taken by several threads; everything else comes in order, for one thread.
  // A connection's kLost comes after all its requests have been answered.
  // `after`, if not 0, is a connection whose last request this thread has just answered: its next one is
  // polled for. `own`: only requests of reserved methods; the others are taken first where both wait.
  bool next_request(uint64_t deadline_ns, Event* event, uint64_t after = 0, bool own = false);
  // What the peer at the other end of an incoming connection said in its hello.
  Status hello_of(uint64_t connection, std::string* hello);
  // The certificate that this peer has shown, as DER; empty without TLS, and when the connection has ended.
  std::string certificate_of(uint64_t connection);
  bool next_event(uint64_t deadline_ns, Event* event);
  // kInvalid: the body is over the limit, and the request still waits for an answer.
  Status reply(uint64_t connection, uint64_t request, bool failed, const std::string& body);

  // Notices: notifications that a driver brings. From now on peers get tokens for them. `fetch` takes in all
  // that have come so far; empty: there are no more. It is not called once this returns with another one.
  void expect_notices(std::function<void()> fetch);
  bool awaits_notices() const { return tokens_.any(); }
  // More notifications wait for the handlers than should.
  bool backlogged();
  // Queues what a driver brought as a notification of the connection that its token was given to; false when
  // it is none, or was taken before.
  bool take_notice(const char* data, size_t length);

 private:
  static constexpr uint64_t kListenerTag = 0;  // link ids begin at 1
  static constexpr uint64_t kWakeTag = ~uint64_t{0};
  static constexpr size_t kEventOverhead = 128;  // what a queued message takes beside its bytes
  using LinkPtr = std::shared_ptr<Link>;

  class Queue {
   public:
    void push(Event event, bool own = false);
    bool pop(uint64_t deadline_ns, Event* event, bool own = false);
    void close();
    size_t size();
    bool empty() const { return waiting_.load(std::memory_order_relaxed) == 0; }

   private:
    std::mutex mutex_;
    std::condition_variable ready_;
    std::condition_variable own_ready_;
    std::deque<Event> events_;
    std::deque<Event> own_;           // those that the thread of the engine's own takes too
    std::atomic<size_t> waiting_{0};  // the size of both, for a look without the lock
    bool closed_ = false;
  };

  void add_link(const LinkPtr& link);
  LinkPtr find(uint64_t connection);
  void lose(const LinkPtr& link, const Status& why);
  void fetch_notices();
  bool give_token(const LinkPtr& link, const FrameHeader& header, const std::string& method);
  // With the link's mutex held.
  bool deliver(Link& link, const NoticeView& notice);
  void push_notification(Link& link, Event event);
  void take_notification(Link& link, std::string method, std::string body);
  void answered(const LinkPtr& link);
  void taken(const Event& event);
  Status secure(Link& link, const std::string& host, uint64_t deadline_ns);
  Status send(const LinkPtr& link, uint8_t type, uint64_t request, const std::string& method,
              const std::string& body);
  // Both with the link's mutex held.
  Status send_locked(Link& link, uint8_t type, uint64_t request, const std::string& method,
                     const std::string& body);
  Status wait_for_room(std::unique_lock<std::mutex>& lock, Link& link, uint64_t deadline_ns);
  void settle(Link& link);
  Status ask(const LinkPtr& link, uint8_t type, const std::string& method, const std::string& body,
             uint64_t deadline_ns, std::string* reply, std::string* remote_error);

  // By any thread, as long as it pays, until `done`; then it sleeps on the socket, until `sleep_until_ns`.
  void poll(const LinkPtr& link, uint64_t most_ns, const std::function<bool()>& done,
            uint64_t sleep_until_ns = 0);
  bool begin_to_poll(const LinkPtr& link);
  void end_polling(const LinkPtr& link, bool goes_on);
  bool read_while_polling(const LinkPtr& link);
  bool take_frames(const LinkPtr& link, bool polling = false);
  bool on_frame(const LinkPtr& link, const FrameHeader& header, std::string method, std::string body);
  bool on_answer(const LinkPtr& link, const FrameHeader& header, std::string body);
  static bool pollable(const Link& link, const FrameHeader& header);
  const mc_handler_v1* compiled(const std::string& method);
  bool answer_compiled(const mc_handler_v1& handler, const LinkPtr& link, uint64_t request,
                       const std::string& body);
  void resume(const Link& link);

  // Of the loop's thread only.
  void run();
  int wait_ms();
  void look_out();
  bool looks_out();
  void tick();
  void drop_silent_links();
  void watch_listener(bool watched);
  void accept_all();
  void make_room_for_strangers();
  void on_ready(const LinkPtr& link, uint32_t events);
  bool open_session(const LinkPtr& link);
  void refuse(const LinkPtr& link, const Status& why);
  void tell_refused(uint64_t connection, std::string text);
  void read_frames(const LinkPtr& link);
  bool admissible(const LinkPtr& link, const FrameHeader& header);
  bool greet(const LinkPtr& link, const FrameHeader& header, std::string body);
  void drop(const LinkPtr& link, const Status& why);

  const ChannelLimits limits_;
  std::shared_ptr<const tls::Context> tls_;
  bool verify_host_ = true;
  Descriptor listener_;
  int epoll_fd_ = -1;
  int wake_fd_ = -1;
  uint16_t port_ = 0;
  std::string hello_;
  std::unordered_set<std::string> own_methods_;
  std::thread loop_;
  const pid_t owner_ = getpid();
  const Origin origin_;
  std::atomic<bool> closing_{false};
  std::atomic<uint64_t> next_id_{1};
  std::mutex mutex_;
  std::unordered_map<uint64_t, LinkPtr> links_;
  std::vector<uint64_t> resumed_;  // links to read from again
  Queue requests_;
  Queue events_;
  NoticeTokens tokens_;
  std::atomic<bool> expects_notices_{false};
  std::atomic<bool> has_compiled_{false};
  std::mutex compiled_mutex_;
  std::unordered_map<std::string, const mc_handler_v1*> compiled_;
  std::atomic<std::thread::id> loop_id_;
  std::mutex fetch_mutex_;  // held while it is called
  std::function<void()> fetch_;

  // Of the loop's thread only.
  std::string scratch_;
  std::vector<uint64_t> again_;             // links that have more to read than one turn takes
  std::map<uint64_t, uint64_t> ungreeted_;  // link -> by when its hello must have come
  int refused_since_tick_ = 0;
  uint64_t next_tick_ns_ = 0;
  SpinBudget spin_;               // of looking out for the next request that a compiled handler answers
  uint64_t looked_ns_ = 0;        // when it last did
  uint64_t look_until_ns_ = 0;    // 0 while it does not
  uint64_t accept_again_ns_ = 0;  // 0 while the listener is watched
};

}  // namespace mooncake
