// The function table of a driver that is written in Python. The engine's threads never run Python: what they
// ask for goes into a mailbox, which a thread of the driver's own empties, and completions come back through
// the queue that compiled drivers use.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "support/completions.hpp"
#include "support/table.hpp"

namespace nb = nanobind;

namespace mooncake {
namespace {

using driver::Completion;
using driver::Completions;
using DriverStatus = driver::Status;

constexpr size_t kDrivers = 8;  // written in Python, in one process: each has a table of its own
constexpr size_t kQueueDepth = 4096;
constexpr double kAnswerS = 30.0;  // for what has no deadline of its own
constexpr double kSlackS = 1.0;    // the driver tells by itself that a deadline has passed

struct Answer {
  bool there = false;
  mc_status code = MC_OK;
  std::string reason;
  std::string payload;
};

// One thing to do. What is not needed for its kind stays empty.
struct Command {
  const char* kind = "";
  std::shared_ptr<Answer> answer;  // null: nobody waits
  uint64_t handle = 0;
  uint64_t other = 0;
  uint64_t number = 0;
  uint64_t length = 0;
  std::string key;
  std::string blob;
  mc_memory memory{};
  std::vector<mc_op> ops;
};

DriverStatus thread_gone() { return driver::failed(MC_CLOSED, "the driver's thread has ended"); }

// One endpoint. Its methods are those that driver::Table wants; what Python uses is below them. Thread-safe.
class Mailbox {
 public:
  Mailbox() : generation_(driver::fork_generation()), completions_(kQueueDepth) {}

  bool forked() const { return driver::fork_generation() != generation_; }
  void close() {
    Command command;
    command.kind = "close";
    (void)ask(std::move(command), driver::deadline_after(kAnswerS), nullptr);
    std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }
  DriverStatus caps(mc_caps& caps) const {
    caps = caps_;
    return {};
  }
  DriverStatus stats(mc_stats& stats) const {
    completions_.add_to(stats);
    std::lock_guard lock(mutex_);
    stats.connections = connections_;
    stats.refused = refused_;
    return {};
  }
  DriverStatus export_address(void* blob, size_t* length) const {
    return driver::copy_out(address_.data(), address_.size(), blob, length);
  }
  DriverStatus connect(const void* address, size_t length, mc_handle* connection) {
    Command command;
    command.kind = "connect";
    command.handle = *connection = driver::new_serial();
    command.blob.assign(static_cast<const char*>(address), length);
    std::lock_guard lock(mutex_);
    ++connections_;
    return post(std::move(command));
  }
  void disconnect(mc_handle connection) {
    std::lock_guard lock(mutex_);
    --connections_;
    late_.erase(connection);
    (void)post(named("disconnect", connection));
  }
  DriverStatus register_memory(const mc_memory& memory, mc_handle* registered) {
    Command command = named("register", driver::new_serial());
    uint64_t handle = command.handle;
    std::memcpy(&command.memory, &memory, std::min<size_t>(memory.struct_size, sizeof memory));
    command.key.assign(reinterpret_cast<const char*>(memory.key), MC_KEY_BYTES);
    std::string blob;
    DriverStatus status = ask(std::move(command), driver::deadline_after(kAnswerS), &blob);
    if (!status.ok()) return status;
    std::lock_guard lock(mutex_);
    blobs_[handle] = std::move(blob);
    *registered = handle;
    return {};
  }
  DriverStatus deregister_memory(mc_handle registered, uint64_t deadline_ns) {
    Command command = named("deregister", registered);
    command.number = deadline_ns;
    DriverStatus status = ask(std::move(command), deadline_ns + slack_ns(), nullptr);
    if (!status.ok()) return status;
    std::lock_guard lock(mutex_);
    blobs_.erase(registered);
    return {};
  }
  DriverStatus export_key(mc_handle registered, void* blob, size_t* length) const {
    std::lock_guard lock(mutex_);
    auto found = blobs_.find(registered);
    if (found == blobs_.end()) return driver::failed(MC_INVALID, "no memory is registered under this handle");
    return driver::copy_out(found->second.data(), found->second.size(), blob, length);
  }
  DriverStatus import_key(mc_handle connection, uint64_t region_id, const uint8_t* key,
                          uint64_t region_length, const void* blob, size_t length, mc_handle* remote) {
    Command command = named("import", driver::new_serial());
    command.other = connection;
    command.number = region_id;
    command.length = region_length;
    command.key.assign(reinterpret_cast<const char*>(key), MC_KEY_BYTES);
    command.blob.assign(static_cast<const char*>(blob), length);
    *remote = command.handle;
    std::lock_guard lock(mutex_);
    return post(std::move(command));
  }
  void release_key(mc_handle remote) {
    std::lock_guard lock(mutex_);
    (void)post(named("release", remote));
  }
  DriverStatus grant(mc_handle registered, const uint8_t* key, uint32_t access, void* blob, size_t* length) {
    Command command = named("grant", registered);
    command.number = access;
    command.key.assign(reinterpret_cast<const char*>(key), MC_KEY_BYTES);
    std::string made;
    DriverStatus status = ask(std::move(command), driver::deadline_after(kAnswerS), &made);
    return status.ok() ? driver::copy_out(made.data(), made.size(), blob, length) : status;
  }
  DriverStatus revoke(mc_handle registered, const uint8_t* key, uint64_t deadline_ns) {
    Command command = named("revoke", registered);
    command.number = deadline_ns;
    if (key != nullptr) command.key.assign(reinterpret_cast<const char*>(key), MC_KEY_BYTES);
    uint64_t limit = deadline_ns == 0 ? driver::deadline_after(kAnswerS) : deadline_ns + slack_ns();
    return ask(std::move(command), limit, nullptr);
  }
  DriverStatus submit(const mc_op* ops, size_t count, size_t* accepted) {
    *accepted = completions_.reserve(count);
    Command command = named("submit", 0);
    command.ops.assign(ops, ops + *accepted);
    std::lock_guard lock(mutex_);
    if (*accepted > 0) {
      if (DriverStatus status = post(std::move(command)); !status.ok()) return status;
    }
    return *accepted == count ? DriverStatus{} : driver::failed(MC_AGAIN, "the queue is full; poll first");
  }
  size_t poll(mc_completion* out, size_t capacity) { return completions_.poll(out, capacity); }
  int event_fd() const { return completions_.event_fd(); }
  bool arm() { return completions_.arm(); }
  void cancel(uint64_t cookie) {
    std::lock_guard lock(mutex_);
    (void)post(named("cancel", cookie));
  }

  DriverStatus read_late(mc_handle connection, void* token, size_t* length) const {
    std::lock_guard lock(mutex_);
    auto found = late_.find(connection);
    if (found != late_.end())
      return driver::copy_out(found->second.data(), found->second.size(), token, length);
    *length = 0;
    return {};
  }
  DriverStatus ask_to_fence(const void* token, size_t length, uint64_t deadline_ns) {
    Command command = named("fence", 0);
    command.number = deadline_ns;
    command.blob.assign(static_cast<const char*>(token), length);
    return ask(std::move(command), deadline_ns + slack_ns(), nullptr);
  }

  // ---- for Python

  DriverStatus open(std::string address, const mc_caps& caps) {
    address_ = std::move(address);
    caps_ = caps;
    return completions_.open();
  }
  // Waits at most so long, less when woken. Empty and closed: nothing comes any more.
  std::vector<Command> take(double timeout_s) {
    std::unique_lock lock(mutex_);
    auto limit = std::chrono::duration<double>(timeout_s);
    changed_.wait_for(lock, limit, [&] { return !commands_.empty() || woken_ || closed_; });
    woken_ = false;
    return std::exchange(commands_, {});
  }
  void wake() {
    std::lock_guard lock(mutex_);
    woken_ = true;
    changed_.notify_all();
  }
  void give(Answer& answer, mc_status code, std::string reason, std::string payload) {
    std::lock_guard lock(mutex_);
    answer.there = true;
    answer.code = code;
    answer.reason = std::move(reason);
    answer.payload = std::move(payload);
    answered_.notify_all();
  }
  // Empty: nothing can land any more.
  void set_late(uint64_t connection, std::string token) {
    std::lock_guard lock(mutex_);
    if (token.empty()) {
      late_.erase(connection);
    } else {
      late_[connection] = std::move(token);
    }
  }
  void finish(std::vector<Completion>& finished) { completions_.push(finished); }
  void count_refusal() {
    std::lock_guard lock(mutex_);
    ++refused_;
  }

 private:
  static uint64_t slack_ns() { return static_cast<uint64_t>(kSlackS * 1e9); }
  static Command named(const char* kind, uint64_t handle) {
    Command command;
    command.kind = kind;
    command.handle = handle;
    return command;
  }
  // With the lock held.
  DriverStatus post(Command command) {
    if (closed_) return thread_gone();
    commands_.push_back(std::move(command));
    changed_.notify_all();
    return {};
  }
  DriverStatus ask(Command command, uint64_t deadline_ns, std::string* payload) {
    auto answer = std::make_shared<Answer>();
    command.answer = answer;
    std::unique_lock lock(mutex_);
    if (DriverStatus status = post(std::move(command)); !status.ok()) return status;
    uint64_t now = driver::now_ns();
    auto limit = std::chrono::nanoseconds(deadline_ns > now ? deadline_ns - now : 0);
    if (!answered_.wait_for(lock, limit, [&] { return answer->there; }))
      return driver::failed(MC_TIMEOUT, "the driver's thread did not answer in time");
    if (payload != nullptr) *payload = std::move(answer->payload);
    return driver::failed(answer->code, answer->reason);
  }

  const uint32_t generation_;
  Completions completions_;
  std::string address_;
  mc_caps caps_{};
  mutable std::mutex mutex_;
  std::condition_variable changed_;   // for who takes
  std::condition_variable answered_;  // for who asks
  std::vector<Command> commands_;
  std::map<uint64_t, std::string> blobs_;
  std::map<uint64_t, std::string> late_;  // tokens by connection
  bool woken_ = false;
  bool closed_ = false;
  uint32_t connections_ = 0;
  uint64_t refused_ = 0;
};

// Never destroyed: the engine may call until the process ends.
std::array<nb::object*, kDrivers> factories{};

// Its type and message, without the traceback, which may be longer than any reason.
std::string text_of(const nb::python_error& error) {
  std::string text = nb::type_name(error.type()).c_str();
  nb::object said = nb::steal(PyObject_Str(error.value().ptr()));
  if (!said.is_valid()) {
    PyErr_Clear();
    return text;
  }
  return text + ": " + nb::cast<std::string>(said);
}

// A number of its own for each driver, because a table's open() says nothing of whose it is. A driver that
// does not fence has neither function in its table, which is a promise.
template <size_t N, bool kFences>
class Numbered : public Mailbox {
 public:
  DriverStatus late_writes(mc_handle connection, void* token, size_t* length) const
    requires kFences
  {
    return read_late(connection, token, length);
  }
  DriverStatus fence(const void* token, size_t length, uint64_t deadline_ns)
    requires kFences
  {
    return ask_to_fence(token, length, deadline_ns);
  }
  static DriverStatus open(const mc_option* options, size_t count, std::shared_ptr<Numbered>& endpoint) {
    GilHeld acquire;
    auto made = std::make_shared<Numbered>();
    try {
      nb::dict given;
      for (size_t i = 0; i < count; ++i) given[options[i].name] = options[i].value;
      call_python(*factories[N], nb::make_tuple(std::static_pointer_cast<Mailbox>(made), given));
    } catch (nb::python_error& error) {
      return driver::failed(MC_UNSUPPORTED, text_of(error));
    }
    endpoint = std::move(made);
    return {};
  }
};

template <bool kFences, size_t... N>
const mc_driver_v1* table_number(size_t number, const char* name, std::index_sequence<N...>) {
  const mc_driver_v1* found = nullptr;
  ((number == N ? void(found = driver::Table<Numbered<N, kFences>>::make(name)) : void()), ...);
  return found;
}

nb::capsule python_driver(const std::string& name, nb::object factory, bool fences) {
  static std::map<std::string, size_t> numbers;
  auto [place, is_new] = numbers.try_emplace(name, numbers.size());
  if (place->second >= kDrivers) {
    numbers.erase(place);
    raise(Status::error(Code::kUnsupported, "a process can have " + std::to_string(kDrivers) +
                                                " drivers that are written in Python, and has them"));
  }
  nb::object*& slot = factories[place->second];
  if (slot == nullptr) slot = new nb::object;
  *slot = std::move(factory);
  // The table keeps the pointer: a name in a map's node stays where it is.
  std::make_index_sequence<kDrivers> all;
  const mc_driver_v1* table = fences ? table_number<true>(place->second, place->first.c_str(), all)
                                     : table_number<false>(place->second, place->first.c_str(), all);
  return nb::capsule(table, MC_DRIVER_CAPSULE);
}

nb::bytes bytes_of(const std::string& text) { return nb::bytes(text.data(), text.size()); }

nb::object memory_of(const Command& command) {
  const mc_memory& memory = command.memory;
  return nb::make_tuple(memory.kind, memory.device, memory.address, memory.length, memory.fd,
                        memory.fd_offset, memory.region_id, memory.numa_node);
}

nb::object ops_of(const Command& command) {
  nb::list rows;
  for (const mc_op& op : command.ops) {
    rows.append(nb::make_tuple(op.opcode, op.connection, op.local, op.remote, op.local_offset,
                               op.remote_offset, op.length, op.cookie));
  }
  return rows;
}

nb::object key_of(const Command& command) {
  return command.key.empty() ? nb::none() : nb::object(bytes_of(command.key));
}

// kind, answer or None, handle, other, number, length, key, blob, memory, ops
nb::tuple row_of(const Command& command) {
  nb::object answer = command.answer ? nb::cast(command.answer) : nb::none();
  bool registers = std::strcmp(command.kind, "register") == 0;
  return nb::make_tuple(command.kind, answer, command.handle, command.other, command.number, command.length,
                        key_of(command), bytes_of(command.blob), registers ? memory_of(command) : nb::none(),
                        command.ops.empty() ? nb::none() : ops_of(command));
}

nb::list take(Mailbox& mailbox, double timeout_s) {
  std::vector<Command> taken;
  {
    GilReleased release;
    taken = mailbox.take(timeout_s);
  }
  nb::list rows;
  for (const Command& command : taken) rows.append(row_of(command));
  return rows;
}

using Finished = std::vector<std::tuple<uint64_t, uint64_t, uint32_t, int, std::string>>;

void finish(Mailbox& mailbox, const Finished& rows) {
  std::vector<Completion> finished(rows.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto& [cookie, bytes, opcode, status, reason] = rows[i];
    finished[i].cookie = cookie;
    finished[i].bytes = bytes;
    finished[i].opcode = static_cast<mc_opcode>(opcode);
    if (status != MC_OK) finished[i].fail(driver::failed(static_cast<mc_status>(status), reason));
  }
  mailbox.finish(finished);
}

void open_mailbox(Mailbox& mailbox, const nb::bytes& address, uint32_t flags, uint64_t kinds,
                  uint64_t bandwidth, uint64_t latency_ns, uint64_t max_op_bytes, uint32_t alignment) {
  mc_caps caps{};
  caps.flags = flags;
  caps.memory_kinds = kinds;
  caps.bandwidth_bytes_per_s = bandwidth;
  caps.latency_ns = latency_ns;
  caps.max_op_bytes = max_op_bytes;
  caps.alignment = alignment;
  caps.in_flight_ops = kQueueDepth;
  DriverStatus status = mailbox.open(to_string(address), caps);
  if (!status.ok()) raise(Status::error(code_of(status.code), status.reason));
}

}  // namespace

void bind_python_driver(nb::module_& m) {
  nb::class_<Answer>(m, "DriverAnswer", "Somebody who waits for what a driver written in Python says.");
  nb::class_<Mailbox>(m, "DriverMailbox", "What the engine asks of one endpoint of a driver in Python.")
      .def("open", &open_mailbox, nb::arg("address"), nb::arg("flags"), nb::arg("kinds"),
           nb::arg("bandwidth"), nb::arg("latency_ns"), nb::arg("max_op_bytes"), nb::arg("alignment"))
      .def("take", &take, nb::arg("timeout_s"),
           nb::sig(
               "def take(self, timeout_s: float) -> list[tuple[str, DriverAnswer | None, int, int, int, int, "
               "bytes | None, bytes, tuple[int, int, int, int, int, int, int, int] | None, "
               "list[tuple[int, int, int, int, int, int, int, int]] | None]]"),
           "Kind, answer, handle, other handle, number, length, key, blob, memory and operations of each.")
      .def("wake", &Mailbox::wake)
      .def(
          "set_late_writes",
          [](Mailbox& mailbox, uint64_t connection, const nb::bytes& token) {
            mailbox.set_late(connection, to_string(token));
          },
          nb::arg("connection"), nb::arg("token"),
          "What may still carry bytes of a connection's writes that are over; empty: nothing.")
      .def("count_refusal", &Mailbox::count_refusal)
      .def("finish", &finish, nb::arg("rows"), "Cookie, bytes, opcode, status and reason of operations.")
      .def(
          "give",
          [](Mailbox& mailbox, const std::shared_ptr<Answer>& answer, int code, const std::string& reason,
             const nb::bytes& payload) {
            mailbox.give(*answer, static_cast<mc_status>(code), reason, to_string(payload));
          },
          nb::arg("answer"), nb::arg("code"), nb::arg("reason"), nb::arg("payload"));
  m.def("python_driver", &python_driver, nb::arg("name"), nb::arg("factory"), nb::arg("fences"),
        "The function table of a driver whose endpoints `factory(mailbox, options)` makes.");
}

}  // namespace mooncake
