#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bind.hpp"
#include "channel.hpp"
#include "engine.hpp"

namespace nb = nanobind;

namespace mooncake {

namespace {

using Blocks = nb::ndarray<const uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;
using Index = nb::ndarray<const uint64_t, nb::shape<-1>, nb::c_contig, nb::device::cpu>;
static_assert(sizeof(Block) == 3 * sizeof(uint64_t), "a row of the array is a Block");

constexpr double kCancelGraceS = 5.0;
constexpr uint64_t kBriefBytes = 16u << 10;  // not worth letting go of the GIL

// What a Python Transfer holds. The transfer itself lives on by itself while it runs.
struct Handle {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Transfer> transfer;
  double timeout_s;
};

Plan::Bounds bounds_of(const Region& local, const RemoteRegion& remote) {
  return {local.length, remote.length(), "local region '" + local.name + "'", remote.label()};
}

void init(Handle* self, std::shared_ptr<Engine> engine, bool write, std::shared_ptr<Region> local,
          std::shared_ptr<RemoteRegion> remote, double timeout_s, Plan plan) {
  std::shared_ptr<Transfer> transfer;
  check(engine->prepare(write ? MC_WRITE : MC_READ, std::move(local), std::move(remote), std::move(plan),
                        &transfer));
  new (self) Handle{std::move(engine), std::move(transfer), timeout_s};
}

void init_blocks(Handle* self, std::shared_ptr<Engine> engine, bool write, std::shared_ptr<Region> local,
                 std::shared_ptr<RemoteRegion> remote, double timeout_s, const Blocks& blocks) {
  Plan plan;
  Status status;
  {
    const Block* rows = reinterpret_cast<const Block*>(blocks.data());
    size_t count = blocks.shape(0);
    auto bounds = bounds_of(*local, *remote);
    if (count < 256) {
      status = Plan::of_blocks(rows, count, bounds, &plan);
    } else {
      GilReleased release;
      status = Plan::of_blocks(rows, count, bounds, &plan);
    }
  }
  check(status);
  init(self, std::move(engine), write, std::move(local), std::move(remote), timeout_s, std::move(plan));
}

Grid::Side side_of(uint64_t base, uint64_t stride, uint64_t outer_stride, const Index& index) {
  return {base, stride, outer_stride, std::vector<uint64_t>(index.data(), index.data() + index.shape(0))};
}

void init_grid(Handle* self, std::shared_ptr<Engine> engine, bool write, std::shared_ptr<Region> local,
               std::shared_ptr<RemoteRegion> remote, double timeout_s, uint64_t length, uint64_t outer,
               uint64_t local_base, uint64_t local_stride, uint64_t local_outer_stride,
               const Index& local_index, uint64_t remote_base, uint64_t remote_stride,
               uint64_t remote_outer_stride, const Index& remote_index) {
  Plan plan;
  check(Plan::of_grid({side_of(local_base, local_stride, local_outer_stride, local_index),
                       side_of(remote_base, remote_stride, remote_outer_stride, remote_index), length, outer},
                      bounds_of(*local, *remote), &plan));
  init(self, std::move(engine), write, std::move(local), std::move(remote), timeout_s, std::move(plan));
}

Priority priority_of(const std::string& name) {
  if (name == "normal") return Priority::kNormal;
  if (name == "high") return Priority::kHigh;
  if (name == "low") return Priority::kLow;
  raise(Status::error(Code::kInvalid, "priority is '" + name + "'; it must be 'high', 'normal' or 'low'"));
}

std::shared_ptr<Message> message_of(const nb::object& given) {
  nb::tuple notify;
  if (!nb::try_cast(given, notify, false) || notify.size() != 2 || !nb::isinstance<nb::str>(notify[0]) ||
      !nb::isinstance<nb::bytes>(notify[1])) {
    raise(Status::error(Code::kInvalid,
                        std::string("notify is ") + nb::repr(given).c_str() +
                            "; it must be a pair: the peer's method (str) and the payload (bytes)"));
  }
  return std::make_shared<Message>(nb::cast<std::string>(notify[0]),
                                   to_string(nb::cast<nb::bytes>(notify[1])));
}

nb::object post(nb::handle_t<Handle> object, const std::optional<std::string>& priority,
                const nb::object& deadline_s, const nb::object& notify, uint64_t stream, uint64_t held,
                const std::vector<std::string>& drivers, uint32_t attempts) {
  Handle& self = nb::cast<Handle&>(object);
  require_origin(self.engine->origin());
  PostOptions options;
  if (priority) options.priority = priority_of(*priority);
  if (!deadline_s.is_none()) options.deadline_ns = deadline_after(seconds_of(deadline_s, "deadline_s"));
  if (!notify.is_none()) options.message = message_of(notify);
  options.stream = reinterpret_cast<void*>(stream);
  options.held = held;
  options.drivers = drivers;
  options.attempts = attempts;
  Status status;
  if (self.transfer->plan.bytes() <= kBriefBytes) {
    status = self.engine->post(self.transfer, options);
  } else {
    GilReleased release;
    status = self.engine->post(self.transfer, options);
  }
  check(status);
  return nb::borrow(object);
}

std::string overdue(Handle& self, double timeout_s) {
  return self.engine->overdue(*self.transfer, timeout_s);
}

// Cancels a transfer whose time is up; false when even then a driver does not let go of the memory.
bool give_up(Handle& self, double timeout_s) {
  Transfer& t = *self.transfer;
  Status late = Status::error(Code::kTimeout, overdue(self, timeout_s));
  return wait_interruptibly(kCancelGraceS, [&](uint64_t deadline) {
    // Again each time: an operation may just have moved to another driver.
    self.engine->cancel(t, late);
    return self.engine->wait(t, deadline);
  });
}

void expire(Handle& self, double limit_s) {
  if (self.transfer->done()) return;
  require_origin(self.engine->origin());
  GilReleased release;
  self.engine->cancel(*self.transfer, Status::error(Code::kTimeout, overdue(self, limit_s)));
}

void wait(Handle& self, const nb::object& timeout_s) {
  Transfer& t = *self.transfer;
  double limit = timeout_s.is_none() ? self.timeout_s : seconds_of(timeout_s, "timeout_s");
  if (t.state() == Transfer::State::kPrepared)
    raise(Status::error(Code::kInvalid, t.label() + " was prepared and never posted; call post() first"));
  if (!t.done()) {
    require_origin(self.engine->origin());
    bool ended = wait_interruptibly(limit, [&](uint64_t deadline) { return self.engine->wait(t, deadline); });
    // Whoever saw its region idle may expect it to be done.
    if (!ended && t.finishing) {
      GilReleased release;
      ended = t.wait_until(deadline_after(kCancelGraceS));
    }
    if (!ended && !give_up(self, limit)) {
      raise(Status::error(Code::kMemoryInUse,
                          t.label() + " cannot be ended: a driver still uses its memory (" +
                              self.engine->explain(t) + "); keep the memory and wait again"));
    }
  }
  if (!t.ok()) raise(t.result());
}

const char* state_of(const Handle& self) {
  switch (self.transfer->state()) {
    case Transfer::State::kPrepared:
      return "prepared";
    case Transfer::State::kRunning:
      return "running";
    default:
      break;
  }
  switch (self.transfer->result().code) {
    case Code::kOk:
      return "done";
    case Code::kCancelled:
      return "cancelled";
    case Code::kTimeout:
      return "timed out";
    default:
      return "failed";
  }
}

bool done(Handle& self) {
  if (self.transfer->done()) return true;
  require_origin(self.engine->origin());
  if (self.transfer->plan.bytes() <= kBriefBytes) {
    self.engine->progress();
  } else {
    GilReleased release;
    self.engine->progress();
  }
  return self.transfer->done();
}

void cancel(Handle& self) {
  Transfer& t = *self.transfer;
  if (t.done()) return;
  require_origin(self.engine->origin());
  GilReleased release;
  self.engine->cancel(t, Status::error(Code::kCancelled, t.label() + " was cancelled"));
}

nb::dict bytes_by_driver(const Handle& self) {
  nb::dict result;
  const auto& rails = self.transfer->remote->peer()->rails();
  for (size_t r = 0; r < rails.size(); ++r) {
    uint64_t bytes = self.transfer->bytes_on_rail(r);
    if (bytes == 0) continue;
    nb::str name(self.engine->endpoints()[rails[r]->endpoint]->name().c_str());
    uint64_t before = result.contains(name) ? nb::cast<uint64_t>(result[name]) : 0;
    result[name] = before + bytes;
  }
  return result;
}

nb::dict bytes_by_rail(const Handle& self) {
  nb::dict result;
  const auto& rails = self.transfer->remote->peer()->rails();
  for (size_t r = 0; r < rails.size(); ++r) {
    if (uint64_t bytes = self.transfer->bytes_on_rail(r)) result[rails[r]->label.c_str()] = bytes;
  }
  return result;
}

// Copies the plan's blocks, from `begin`, into an N x 3 array; returns how many there were.
size_t blocks_into(const Handle& self, size_t begin,
                   nb::ndarray<uint64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu> out) {
  const Plan& plan = self.transfer->plan;
  size_t count = begin < plan.size() ? std::min(plan.size() - begin, out.shape(0)) : 0;
  Block* rows = reinterpret_cast<Block*>(out.data());
  for (size_t i = 0; i < count; ++i) rows[i] = plan.at(begin + i);
  return count;
}

// What this thread asks a peer for, while it waits for the answer.
thread_local const Handle* asking = nullptr;
thread_local uint64_t asking_ticket = 0;

bool is_unwanted() { return !asking->engine->wants_check(*asking->transfer, asking_ticket); }

// (failed at the other side, body)
nb::tuple call_peer(Handle& self, uint64_t ticket, uint64_t connection, const std::string& method,
                    const nb::bytes& body, double timeout_s) {
  require_origin(self.engine->origin());
  std::string request = to_string(body), reply, remote_error;
  Status status;
  {
    GilReleased release;
    asking = &self;
    asking_ticket = ticket;
    interrupted = &is_unwanted;
    Channel& channel = *self.engine->channel();
    status = channel.call(connection, method, request, deadline_after(timeout_s), &reply, &remote_error);
    interrupted = nullptr;
  }
  if (status.code == Code::kTimeout) status.code = Code::kNoAnswer;
  check(status);
  bool failed = !remote_error.empty();
  return nb::make_tuple(failed, to_bytes(failed ? remote_error : reply));
}

// What hindered a comparison, by the name of its exception.
Code code_of_check(const std::string& error) {
  if (error == "PeerUnreachable") return Code::kUnreachable;
  if (error == "CallTimeout") return Code::kNoAnswer;
  if (error == "RegionRefused") return Code::kRefused;
  return Code::kIntegrity;
}

void signal_when_done(Handle& self, int fd) {
  require_origin(self.engine->origin());
  check(self.transfer->signal_when_done(fd));
  self.engine->attend();
}

}  // namespace

void bind_transfer(nb::module_& m) {
  nb::class_<Handle>(m, "Transfer", "A batch of operations: prepared once, posted any number of times.")
      .def("__init__", &init_blocks, nb::arg("engine"), nb::arg("write"), nb::arg("local"), nb::arg("remote"),
           nb::arg("timeout_s"), nb::arg("blocks"))
      .def("__init__", &init_grid, nb::arg("engine"), nb::arg("write"), nb::arg("local"), nb::arg("remote"),
           nb::arg("timeout_s"), nb::arg("length"), nb::arg("outer"), nb::arg("local_base"),
           nb::arg("local_stride"), nb::arg("local_outer_stride"), nb::arg("local_index"),
           nb::arg("remote_base"), nb::arg("remote_stride"), nb::arg("remote_outer_stride"),
           nb::arg("remote_index"))
      .def(
          "launch", &post, nb::kw_only(), nb::arg("priority") = nb::none(),
          nb::arg("deadline_s") = nb::none(), nb::arg("notify") = nb::none(), nb::arg("stream") = 0,
          nb::arg("held") = 0, nb::arg("drivers") = std::vector<std::string>{}, nb::arg("attempts") = 0,
          nb::sig("def launch(self, *, priority: str | None = None, deadline_s: float | None = None, notify: "
                  "tuple[str, bytes] | None = None, stream: int = 0, held: int = 0, drivers: Sequence[str] = "
                  "(), attempts: int = 0) -> Transfer"))
      .def("wait", &wait, nb::arg("timeout_s") = nb::none(),
           nb::sig("def wait(self, timeout_s: float | None = None) -> None"))
      .def("overdue", &overdue, nb::arg("timeout_s"), nb::call_guard<GilReleased>(),
           "What to say of it when it is not done after so long: peer, region and cause.")
      .def("expire", &expire, nb::arg("limit_s"),
           "Cancel it, as it was not done within that limit: wait() raises TransferTimeout then.")
      .def("done", &done)
      .def("cancel", &cancel)
      .def("signal_when_done", &signal_when_done, nb::arg("event_fd"))
      .def(
          "release",
          [](Handle& self, uint64_t ticket, nb::bytes failure, const std::string& error) {
            Status status;
            if (failure.size() != 0) status = Status::error(code_of_check(error), to_string(failure));
            GilReleased release;
            self.engine->release(*self.transfer, ticket, status);
          },
          nb::arg("ticket"), nb::arg("failure"), nb::arg("error"),
          "End the held run: well when `failure` is empty, otherwise with that exception of _errors.")
      .def(
          "begin_check",
          [](Handle& self, uint64_t ticket) { return self.engine->begin_check(*self.transfer, ticket); },
          nb::arg("ticket"), nb::call_guard<GilReleased>())
      .def(
          "end_check", [](Handle& self, uint64_t ticket) { self.engine->end_check(*self.transfer, ticket); },
          nb::arg("ticket"), nb::call_guard<GilReleased>())
      .def(
          "wants_check",
          [](Handle& self, uint64_t ticket) { return self.engine->wants_check(*self.transfer, ticket); },
          nb::arg("ticket"), nb::call_guard<GilReleased>())
      .def("call_peer", &call_peer, nb::arg("ticket"), nb::arg("connection"), nb::arg("method"),
           nb::arg("body"), nb::arg("timeout_s"),
           nb::sig("def call_peer(self, ticket: int, connection: int, method: str, body: bytes, "
                   "timeout_s: float) -> tuple[bool, bytes]"),
           "As Channel.call, but ends early when the held run is cancelled.")
      .def("blocks_into", &blocks_into, nb::arg("begin"), nb::arg("out"))
      .def_prop_ro("write", [](const Handle& self) { return self.transfer->opcode == MC_WRITE; })
      .def_prop_ro("state", &state_of)
      .def_prop_ro("blocks", [](const Handle& self) { return self.transfer->plan.size(); })
      .def_prop_ro("nbytes", [](const Handle& self) { return self.transfer->plan.bytes(); })
      .def_prop_ro("bytes_done", [](const Handle& self) { return self.transfer->bytes_done(); })
      .def_prop_ro("seconds", [](const Handle& self) { return self.transfer->seconds(); })
      .def_prop_ro("failure", [](const Handle& self) { return self.transfer->result().reason; })
      .def_prop_ro("bytes_by_driver", &bytes_by_driver,
                   nb::for_getter(nb::sig("def bytes_by_driver(self) -> dict[str, int]")))
      .def_prop_ro("bytes_by_rail", &bytes_by_rail,
                   nb::for_getter(nb::sig("def bytes_by_rail(self) -> dict[str, int]")));
}

}  // namespace mooncake
