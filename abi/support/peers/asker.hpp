// The side that uses a peer's memory: it connects, asks for regions, and lets go of them when told to.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "../keys.hpp"
#include "../os.hpp"
#include "address.hpp"
#include "channel.hpp"
#include "grantor.hpp"
#include "lease.hpp"
#include "loop.hpp"

namespace mooncake::driver {

// The socket of one attempt to be connected. Whoever may still touch the peer's memory shares it: when the
// last one lets go, the peer is told so.
struct Link {
  Link(UniqueFd socket, PeerInfo info, UniqueFd its_end)
      : channel(std::move(socket)), peer(info), pidfd(std::move(its_end)) {}
  ~Link();

  // MC_OK while the peer lives, as far as this host can know.
  Status check_alive() const;

  Channel channel;  // service thread only
  const PeerInfo peer;
  std::shared_ptr<LeasePage> leases;  // comes with the welcome of a peer at the same host; constant then
  const UniqueFd pidfd;  // tells of the peer's end even where a forked child of it keeps the socket open
  std::atomic<bool> lost{false};  // not by our own will
  bool ended = false;             // service thread only: the socket is left alone until the farewell
  uint32_t generation = fork_generation();
  std::shared_ptr<void> state;  // the driver's; service thread only
};

// A region of a peer that may be used. A driver derives its own; the destructor gives the memory back.
struct Opened {
  virtual ~Opened() = default;
  // The first of the base, so it ends last: who waits for it knows that the driver's part is destroyed.
  std::shared_ptr<void> life = std::make_shared<char>();
  std::shared_ptr<Link> link;
  uint64_t grant = 0;
  const LeaseSlot* lease = nullptr;  // of the link's page; null: the owner is at another host
  uint32_t token = 0;
  uint32_t access = 0;
  uint64_t length = 0;

  // MC_REFUSED when the owner took the region or the key back, the range is not inside the region as its
  // owner registered it, or the key does not allow it.
  Status check(mc_opcode opcode, uint64_t offset, uint64_t count) const;
};

struct Connection;

// A peer's region by name. Fields are the asker's.
struct Remote {
  enum class State { kUnasked, kAsked, kOpen, kRefused };
  // Called once, on any thread: with what is open, or with why it is not.
  using Waiting = std::pair<uint64_t, std::function<void(const std::shared_ptr<Opened>&, const Status&)>>;

  std::weak_ptr<Connection> connection;
  uint64_t id = 0;
  Key key{};
  State state = State::kUnasked;
  Status refusal;
  uint64_t ask_again_ns = 0;
  std::shared_ptr<Opened> opened;
  std::vector<Waiting> waiting;
  std::vector<Offer::Part> parts;  // that have come before their grant
};

struct Connection {
  enum class State { kConnecting, kReady, kLost, kClosed };
  Address address{};
  State state = State::kConnecting;
  uint64_t attempt = 1;
  std::shared_ptr<Link> link;
  std::map<std::pair<uint64_t, Key>, std::shared_ptr<Remote>> remotes;
  std::vector<std::shared_ptr<Remote>> unasked;
  std::unordered_map<uint64_t, std::shared_ptr<Remote>> asked;    // by request
  std::unordered_map<uint64_t, std::shared_ptr<Remote>> granted;  // by grant
};

// What a driver does in it. All are called on the service thread, without a lock.
struct AskerHooks {
  // Makes the granted memory usable.
  std::function<Status(const std::shared_ptr<Link>&, const Message& grant, std::vector<Offer::Part> parts,
                       std::shared_ptr<Opened>&)>
      open;
  // A message of kind kDriver; false: it breaks the rules, and the connection ends. May be empty.
  std::function<bool(const std::shared_ptr<Link>&, const Message&, UniqueFd passed)> on_message;
  // The connection of this link has ended. May be empty.
  std::function<void(const std::shared_ptr<Link>&, const Status&)> ended;
  // Something waits until operations are over: look whether they are.
  std::function<void()> nudge;
  // Peers at other hosts are connected to, at the TCP listener that their address names.
  bool over_tcp = false;
};

// Thread-safe.
class Asker {
 public:
  Asker(Loop& loop, double answer_timeout_s, const Address& own, AskerHooks hooks)
      : loop_(loop), answer_timeout_s_(answer_timeout_s), own_(own), hooks_(std::move(hooks)) {}

  // MC_UNREACHABLE when no control connection leads there.
  Status reachable(const Address& address) const;
  std::shared_ptr<Connection> connect(const Address& address);
  void disconnect(const std::shared_ptr<Connection>& connection);
  void close();

  std::shared_ptr<Remote> import(const std::shared_ptr<Connection>& connection, uint64_t region_id,
                                 const Key& key);

  // What is open; null: ask by use(). For who names one again and again, since it makes no callback.
  std::shared_ptr<Opened> opened(const std::shared_ptr<Remote>& remote);
  // What is open, at once; null with a failure; or null with MC_AGAIN: `later` is called when it is decided,
  // unless forget() takes its cookie away before. An empty `later` only asks.
  std::shared_ptr<Opened> use(const std::shared_ptr<Remote>& remote, Status& status, uint64_t cookie,
                              std::function<void(const std::shared_ptr<Opened>&, const Status&)> later);
  // Takes away, and calls with `why`, what waits under this cookie.
  void forget(uint64_t cookie, const Status& why);

  // On the service thread.
  void send(const std::shared_ptr<Link>& link, const Message& message,
            std::shared_ptr<const UniqueFd> passed = nullptr);

  uint32_t open_connections() const;

 private:
  using ConnectionPointer = std::shared_ptr<Connection>;
  using RemotePointer = std::shared_ptr<Remote>;
  // Events of a former attempt to be connected mean nothing.
  struct Attempt {
    ConnectionPointer connection;
    uint64_t number;
  };
  // What was open once: the grant is given back when nobody uses it any more.
  struct Closing {
    std::weak_ptr<Link> link;
    std::weak_ptr<void> life;
    uint64_t grant;
  };

  // With the mutex held.
  bool current(const Attempt& attempt) const;
  void want(const ConnectionPointer& connection, const RemotePointer& remote);

  // On the service thread.
  void begin(const Attempt& attempt);
  void try_to_connect(const Attempt& attempt, uint64_t deadline_ns);
  UniqueFd open_socket(const Address& address, Status& status, bool& again) const;
  void greet(const Attempt& attempt, const std::shared_ptr<Link>& link);
  void on_event(const Attempt& attempt, const std::shared_ptr<Link>& link, uint32_t epoll_events);
  bool on_message(const Attempt& attempt, const std::shared_ptr<Link>& link, Message& message,
                  UniqueFd passed);
  bool on_welcome(const Attempt& attempt, const std::shared_ptr<Link>& link, const Message& welcome,
                  const UniqueFd& passed);
  void ask(const Attempt& attempt, const RemotePointer& remote);
  void on_part(const Attempt& attempt, const Message& part, UniqueFd passed);
  void on_grant(const Attempt& attempt, const std::shared_ptr<Link>& link, const Message& grant);
  void on_revoke(const Attempt& attempt, uint64_t grant);
  void let_go(Closing closing);

  // Any thread.
  void settle(const Attempt& attempt, const RemotePointer& remote, const std::shared_ptr<Opened>& opened,
              const Status& refusal);
  void lose(const Attempt& attempt, const Status& failure);
  void end(const Attempt& attempt, Connection::State state, const Status& failure);

  Loop& loop_;
  const double answer_timeout_s_;
  const Address& own_;
  const AskerHooks hooks_;
  uint64_t next_request_ = 1;  // service thread only

  mutable std::mutex mutex_;
  std::vector<ConnectionPointer> connections_;
};

}  // namespace mooncake::driver
