// An owner in a process of its own, whose regions and keys come and go while this process uses them; another
// that is killed with operations on their way. Usage: NAME SECONDS.
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <random>

#include "device_memory.hpp"
#include "moving.hpp"

namespace sanitized {
namespace {

constexpr size_t kMovers = 2;
constexpr size_t kRestless = 64 << 10;
constexpr int kUseMs = 2;  // how long a region of the owner's stays

// What the owner tells of itself, one packet each.
struct News {
  enum Kind : uint32_t { kAddress, kRegion, kKey };
  Kind kind;
  uint32_t access;
  uint64_t region_id, region_length;
  Key key;
  uint64_t blob_length;
  char blob[MC_BLOB_MAX];
};

News news_of(News::Kind kind, const Exported& exported, uint32_t access) {
  News news{};
  news.kind = kind;
  news.access = access;
  news.region_id = exported.region_id;
  news.region_length = exported.length;
  news.key = exported.key;
  news.blob_length = exported.blob.size();
  std::memcpy(news.blob, exported.blob.data(), exported.blob.size());
  return news;
}

Exported exported_in(const News& news) {
  return {news.region_id, news.key, news.region_length, std::string(news.blob, news.blob_length)};
}

// In the child.
class Owner {
 public:
  Owner(const std::string& driver, int socket) : socket_(socket), endpoint_(driver, "owner") {
    Exported address;
    address.blob = endpoint_.address();
    tell(news_of(News::kAddress, address, 0));
    Exported exported;
    endpoint_.add(pages_, &exported);
    tell(news_of(News::kRegion, exported, MC_ACCESS_READ | MC_ACCESS_WRITE));
  }

  // Until the other process hangs up.
  void run() {
    std::thread regions([this] {
      for (unsigned round = 0; !over_; ++round) lend_a_region(round);
    });
    std::thread keys([this] { lend_keys(); });
    char nothing;
    while (recv(socket_, &nothing, 1, 0) > 0) {
    }
    over_ = true;
    regions.join();
    keys.join();
    endpoint_.close();
  }

 private:
  void tell(const News& news) {
    // Nobody may listen any more.
    [[maybe_unused]] ssize_t sent = send(socket_, &news, sizeof news, MSG_NOSIGNAL);
  }

  void take_back(mc_handle region) {
    mc_status status =
        endpoint_.table().deregister_memory(endpoint_.handle(), region, seconds_from_now(kOperationS));
    check(status, endpoint_, "deregister_memory");
  }

  static void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(kUseMs)); }

  // Memory of its own each time, which is freed at once when the region is back.
  void lend_a_region(unsigned round) {
    Pages pages(kRestless, endpoint_.memory());
    Exported exported;
    mc_handle region = endpoint_.add(pages, &exported);
    tell(news_of(News::kRegion, exported, MC_ACCESS_READ | MC_ACCESS_WRITE));
    rest();
    take_back(region);
    std::memset(pages.bytes, static_cast<char>(round), pages.size);
    for (size_t i = 0; i < pages.size; i += 61)
      require(pages.bytes[i] == static_cast<char>(round), "a region that was taken back is written to");
  }

  void lend_keys() {
    Pages pages(kRestless, endpoint_.memory());
    Exported whole;
    mc_handle region = endpoint_.add(pages, &whole);
    for (unsigned round = 0; !over_; ++round) {
      Exported lesser = whole;
      lesser.key = Key::random();
      lesser.blob.resize(MC_BLOB_MAX);
      size_t length = lesser.blob.size();
      uint32_t access = round % 2 ? MC_ACCESS_READ : MC_ACCESS_WRITE;
      check(endpoint_.table().grant(endpoint_.handle(), region, lesser.key.bytes, access, lesser.blob.data(),
                                    &length),
            endpoint_, "grant");
      lesser.blob.resize(length);
      tell(news_of(News::kKey, lesser, access));
      rest();
      uint64_t deadline = round % 4 < 2 ? 0 : seconds_from_now(kOperationS);
      check(endpoint_.table().revoke(endpoint_.handle(), region, lesser.key.bytes, deadline), endpoint_,
            "revoke");
    }
    take_back(region);
  }

  const int socket_;
  Endpoint endpoint_;
  Pages pages_{(kMovers + 1) * kPart, endpoint_.memory()};
  std::atomic<bool> over_{false};
};

// A child that waits until it hears something; then it is an owner.
struct Child {
  explicit Child(const std::string& driver) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "a pair of sockets");
    pid = fork();
    require(pid >= 0, "a process");
    socket = ends[pid == 0];
    close(ends[pid != 0]);
    if (pid != 0) return;
    char word;
    if (recv(socket, &word, 1, 0) == 1) Owner(driver, socket).run();
    check_rules_of_doubles();
    std::exit(0);
  }

  void begin() { require(send(socket, "b", 1, MSG_NOSIGNAL) == 1, "the owner does not begin"); }
  bool next(News& news) { return recv(socket, &news, sizeof news, 0) == sizeof news; }
  Exported next_region() {
    News news;
    require(next(news) && news.kind == News::kRegion, "the owner has no region");
    return exported_in(news);
  }
  std::string address() {
    News news;
    require(next(news) && news.kind == News::kAddress, "the owner has no address");
    return exported_in(news).blob;
  }
  int wait() {
    int status = 0;
    require(waitpid(pid, &status, 0) == pid, "the owner's end");
    return status;
  }

  pid_t pid = -1;
  int socket = -1;
};

class User {
 public:
  User(const std::string& driver, Child& owner) : owner_(owner), endpoint_(driver, "user") {
    owner_.begin();
    Exported unused;
    mc_handle local = endpoint_.add(pages_, &unused);
    mc_handle connection = endpoint_.connect(owner_.address());
    route_ = {&endpoint_, connection, local, endpoint_.import(connection, owner_.next_region())};
  }

  ~User() { endpoint_.close(); }  // before its memory goes

  void run(uint64_t until_ns) {
    std::thread taking([this] { take_what_is_lent(); });
    std::vector<std::thread> movers;
    for (size_t i = 0; i < kMovers; ++i)
      movers.emplace_back([this, i, until_ns] { move_batches(route_, i, until_ns, counts_); });
    for (std::thread& mover : movers) mover.join();
    check_bytes(route_, pages_);
    shutdown(owner_.socket, SHUT_WR);
    taking.join();
    require(owner_.wait() == 0, "the owner failed");
    require(lent_ > 0 && counts_.moved > 0, "nothing was lent or moved");
  }

  // The owner dies: what is on its way ends, and memory of this process is its own again.
  void lose_the_owner() {
    Operations batch(kCells);
    for (size_t i = 0; i < kCells; ++i)
      set(batch, i, route_.op(i % 2 ? MC_READ : MC_WRITE, i * kCell, i * kCell, kCell));
    endpoint_.submit(batch);
    kill(owner_.pid, SIGKILL);
    require(batch.wait(kOperationS), "operations outlive the owner");
    for (const Slot& slot : batch.slots) require_status(slot, {MC_OK, MC_UNREACHABLE});
    owner_.wait();
    mc_status after = route_.try_one(route_.op(MC_READ, 0, 0, kCell));
    require(after == MC_UNREACHABLE, "a dead owner is read");
  }

  void print(const std::string& driver) const {
    std::printf("%s: %zu operations, %zu cancelled, %zu refused, %zu lent\n", driver.c_str(),
                counts_.moved.load(), counts_.cancelled.load(), counts_.refused.load(), lent_);
  }

 private:
  static void require_status(const Slot& slot, std::initializer_list<mc_status> expected) {
    for (mc_status one : expected) {
      if (slot.result.status == one) return;
    }
    mc_opcode opcode = static_cast<mc_opcode>(slot.owner->ops[&slot - slot.owner->slots.data()].opcode);
    fail(std::string(opcode == MC_READ ? "a read" : "a write") + " ended as " +
         std::to_string(slot.result.status) + ": " + slot.result.reason);
  }

  void take_what_is_lent() {
    for (News news; owner_.next(news); ++lent_) {
      Route route = route_;
      route.remote = endpoint_.import(route.connection, exported_in(news));
      Operations both(kRestless / kCell);  // disjoint: reads and writes by turns
      for (size_t i = 0; i < both.ops.size(); ++i) {
        uint64_t at = i * kCell;
        set(both, i, route.op(i % 2 ? MC_READ : MC_WRITE, kMovers * kPart + at, at, kCell));
      }
      endpoint_.submit(both);
      require(both.wait(kOperationS), "operations on what was lent do not end");
      for (size_t i = 0; i < both.slots.size(); ++i) {
        bool allowed = (news.access & (i % 2 ? MC_ACCESS_READ : MC_ACCESS_WRITE)) != 0;
        counts_.refused += both.slots[i].result.status == MC_REFUSED;
        allowed ? require_status(both.slots[i], {MC_OK, MC_REFUSED, MC_UNREACHABLE})
                : require_status(both.slots[i], {MC_REFUSED, MC_UNREACHABLE});
      }
      endpoint_.table().release_key(endpoint_.handle(), route.remote);
    }
  }

  Child& owner_;
  Endpoint endpoint_;
  Pages pages_{(kMovers + 1) * kPart, endpoint_.memory()};
  Route route_{};
  Counts counts_;
  size_t lent_ = 0;
};

}  // namespace
}  // namespace sanitized

int main(int count, char** words) {
  sanitized::require(count == 3, "usage: process_stress NAME SECONDS");
  const std::string driver = words[1];
  // Both before this process has threads.
  sanitized::Child first(driver), second(driver);
  {
    sanitized::User user(driver, first);
    user.run(sanitized::seconds_from_now(std::strtod(words[2], nullptr)));
    user.print(driver);
  }
  sanitized::User(driver, second).lose_the_owner();
  sanitized::check_rules_of_doubles();
  return 0;
}
