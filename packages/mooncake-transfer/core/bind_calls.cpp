// The engine for compiled code of other packages: abi/mooncake_calls.h.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>

#include "bind.hpp"
#include "channel.hpp"
#include "engine.hpp"
#include "mooncake_calls.h"

namespace nb = nanobind;

namespace mooncake {

namespace calls {

namespace {

constexpr uint64_t kLetGoNs = 5'000'000'000;  // for a driver to let go of the memory

struct Calls {
  mc_calls_v1 table;
  nb::object keeps;  // the engine, and with it its channel
  std::shared_ptr<Engine> engine;
};

struct Run {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Transfer> transfer;
};

using KeptRegion = std::shared_ptr<Region>;
using KeptRemote = std::shared_ptr<RemoteRegion>;

Engine& engine_of(void* context) { return *static_cast<Calls*>(context)->engine; }

void fail(void** failure, Status status) { *failure = new Status(std::move(status)); }

Status forked() {
  return Status::error(Code::kForked,
                       "this engine belongs to the parent process; make a new one in this process");
}

// `owner`: the attribute by which one comes from the object to its TransferEngine.
template <typename Kept>
void* keep(const Calls& calls, nb::handle object, nb::object (*owner)(nb::handle)) {
  try {
    Kept kept;
    if (!owner(object).attr("_core").is(calls.keeps)) return nullptr;
    if (!nb::try_cast(object.attr("_core"), kept, false) || !kept) return nullptr;
    return new Kept(std::move(kept));
  } catch (const nb::python_error&) {  // something else
    return nullptr;
  }
}

void* keep_region(void* context, void* object) {
  return keep<KeptRegion>(*static_cast<Calls*>(context), static_cast<PyObject*>(object),
                          [](nb::handle region) { return nb::object(region.attr("_engine")); });
}

void* keep_remote(void* context, void* object) {
  return keep<KeptRemote>(*static_cast<Calls*>(context), static_cast<PyObject*>(object),
                          [](nb::handle region) { return nb::object(region.attr("peer").attr("_engine")); });
}

template <typename Kept>
void drop(void* kept) {
  delete static_cast<Kept*>(kept);
}

// Lets the waits of the core ask for Ctrl-C, as long as it lives; without the interpreter's lock.
struct Asking {
  Asking() { interrupted = &has_signal; }
  ~Asking() { interrupted = nullptr; }
};

int call(void* context, uint64_t connection, const char* method, const void* body, size_t nbytes,
         uint64_t deadline_ns, void* reply, void (*write)(void* reply, const void* bytes, size_t nbytes),
         void** failure) {
  Engine& engine = engine_of(context);
  Status status = forked();
  std::string answer, remote_error;
  bool stopped = false;
  if (!engine.origin().forked()) {
    Asking asking;
    std::string request(static_cast<const char*>(body), nbytes);
    status = engine.channel()->call(connection, method, request, deadline_ns, &answer, &remote_error);
    // It was asked for during the wait, which then ends as at the deadline.
    stopped = status.code == Code::kTimeout && now_ns() < deadline_ns;
  }
  if (stopped) return MC_CALL_INTERRUPTED;
  if (status.code == Code::kTimeout) status.code = Code::kNoAnswer;
  if (!status.ok()) {
    fail(failure, std::move(status));
    return MC_CALL_FAILED;
  }
  if (!remote_error.empty()) return MC_CALL_REFUSED;
  write(reply, answer.data(), answer.size());
  return MC_CALL_DONE;
}

void* begin(void* context, int write, void* region, void* remote, uint64_t offset, uint64_t remote_offset,
            uint64_t nbytes, void** failure) {
  auto& calls = *static_cast<Calls*>(context);
  auto& local = *static_cast<KeptRegion*>(region);
  auto& there = *static_cast<KeptRemote*>(remote);
  Status status = calls.engine->origin().forked() ? forked() : Status{};
  Plan plan;
  std::shared_ptr<Transfer> transfer;
  if (status.ok()) {
    Block block{offset, remote_offset, nbytes};
    status = Plan::of_blocks(
        &block, 1, {local->length, there->length(), "local region '" + local->name + "'", there->label()},
        &plan);
  }
  if (status.ok())
    status = calls.engine->prepare(write ? MC_WRITE : MC_READ, local, there, std::move(plan), &transfer);
  if (status.ok()) status = calls.engine->post(transfer, {});
  if (status.ok()) return new Run{calls.engine, std::move(transfer)};
  fail(failure, std::move(status));
  return nullptr;
}

// Whether it has ended; looks for Ctrl-C.
bool wait_for(Engine& engine, Transfer& transfer, uint64_t deadline_ns, bool* stopped) {
  for (;;) {
    uint64_t until = slice_until(deadline_ns);
    if (engine.wait(transfer, until)) return true;
    if (until >= deadline_ns) return false;
    if ((*stopped = interrupted())) return false;
  }
}

int finish(void* given, uint64_t deadline_ns, void** failure) {
  Run& run = *static_cast<Run*>(given);
  Engine& engine = *run.engine;
  Transfer& transfer = *run.transfer;
  uint64_t began = now_ns();
  double limit_s = deadline_ns > began ? static_cast<double>(deadline_ns - began) * 1e-9 : 0;
  bool stopped = false, ended;
  {
    Asking asking;
    ended = wait_for(engine, transfer, deadline_ns, &stopped);
  }
  Status late;
  if (!ended) late = Status::error(Code::kTimeout, engine.overdue(transfer, limit_s));
  for (uint64_t until = now_ns() + kLetGoNs; !ended && now_ns() < until;) {
    // Again each time: an operation may just have moved to another driver.
    engine.cancel(transfer, late);
    ended = engine.wait(transfer, std::min(until, now_ns() + kLetGoNs / 50));
  }
  if (stopped) return MC_CALL_INTERRUPTED;
  if (ended && transfer.ok()) return MC_CALL_DONE;
  fail(failure, ended
                    ? transfer.result()
                    : Status::error(Code::kMemoryInUse,
                                    transfer.label() + " cannot be ended: a driver still uses its memory (" +
                                        engine.explain(transfer) + "); keep the memory"));
  return MC_CALL_FAILED;
}

void cancel(void* given) {
  Run& run = *static_cast<Run*>(given);
  Status why = Status::error(Code::kCancelled, run.transfer->label() + " was cancelled");
  run.engine->cancel(*run.transfer, why);
}

void end(void* given) { delete static_cast<Run*>(given); }

void raise_failure(void* failure) {
  std::unique_ptr<Status> status(static_cast<Status*>(failure));
  try {
    raise(*status);
  } catch (nb::python_error& error) {
    error.restore();
  }
}

nb::capsule compiled_calls(nb::handle_t<Engine> object) {
  auto calls = std::make_unique<Calls>();
  calls->keeps = nb::borrow(object);
  calls->engine = nb::cast<std::shared_ptr<Engine>>(object);
  calls->table = {.abi_major = MC_CALLS_ABI_MAJOR,
                  .abi_minor = MC_CALLS_ABI_MINOR,
                  .struct_size = sizeof(mc_calls_v1),
                  .context = calls.get(),
                  .keep_region = &keep_region,
                  .keep_remote = &keep_remote,
                  .drop_region = &drop<KeptRegion>,
                  .drop_remote = &drop<KeptRemote>,
                  .call = &call,
                  .begin = &begin,
                  .finish = &finish,
                  .cancel = &cancel,
                  .end = &end,
                  .raise = &raise_failure};
  static_assert(offsetof(Calls, table) == 0);
  return nb::capsule(calls.release(), MC_CALLS_CAPSULE,
                     [](void* p) noexcept { delete static_cast<Calls*>(p); });
}

}  // namespace

}  // namespace calls

void bind_calls(nb::module_& m) {
  m.def("compiled_calls", &calls::compiled_calls, nb::arg("engine"),
        "A capsule with the functions of abi/mooncake_calls.h.");
}

}  // namespace mooncake
