#include "bind_pg.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <utility>
#include <vector>

#include "engine.hpp"
#include "support/gil.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace mooncake::ep::pg {

namespace {

using Spans = std::vector<std::pair<uintptr_t, uint64_t>>;

bool signals_wait() {
  GilHeld held;
  return PyErr_CheckSignals() != 0;
}

uint64_t timeout_ns(double seconds) {
  return seconds < 0 || seconds > 1e9 ? ~uint64_t{0} : static_cast<uint64_t>(seconds * 1e9);
}

Wait wait_for(double seconds) {
  uint64_t time = timeout_ns(seconds);
  return {time == ~uint64_t{0} ? time : driver::now_ns() + time, signals_wait};
}

uint8_t* pointer(uintptr_t address) { return reinterpret_cast<uint8_t*>(address); }

std::vector<Bytes> bytes_of(const Spans& spans) {
  std::vector<Bytes> bytes;
  bytes.reserve(spans.size());
  for (auto [address, nbytes] : spans) bytes.push_back({pointer(address), nbytes});
  return bytes;
}

std::vector<Bytes> even(uintptr_t address, uint64_t each, int count) {
  std::vector<Bytes> bytes;
  for (int i = 0; i < count; ++i) bytes.push_back({pointer(address) + static_cast<uint64_t>(i) * each, each});
  return bytes;
}

// None: done, with every member. An exception that a signal handler raised goes on.
nb::object outcome(Result&& result) {
  if (result.code == Code::kDone) return nb::none();
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return nb::cast(std::move(result));
}

// Now, or by the engine's thread: then a ticket is returned.
template <typename Work>
nb::object collective(Engine& engine, double timeout_s, bool queued, Work&& work) {
  if (queued) return nb::int_(engine.queue(std::forward<Work>(work), timeout_ns(timeout_s)));
  Result result;
  {
    GilReleased released;
    result = engine.run(work, wait_for(timeout_s));
  }
  return outcome(std::move(result));
}

Reduction reduction_of(uint32_t type, uint32_t op, double factor) {
  Reduction reduction{static_cast<Type>(type), static_cast<Op>(op), factor};
  if (type > static_cast<uint32_t>(Type::kBool) || op > static_cast<uint32_t>(Op::kPremulSum) ||
      !can_reduce(reduction.type, reduction.op)) {
    throw nb::value_error("this reduction is not there for this type");
  }
  return reduction;
}

nb::object all_reduce(Engine& engine, uintptr_t data, size_t count, uint32_t type, uint32_t op, double factor,
                      double timeout_s, bool queued) {
  Reduction reduction = reduction_of(type, op, factor);
  return collective(engine, timeout_s, queued, [=](Collectives& collectives, const Wait& wait) {
    return collectives.all_reduce(reduction, pointer(data), count, wait);
  });
}

nb::object reduce_to(Engine& engine, int root, uintptr_t data, size_t count, uint32_t type, uint32_t op,
                     double factor, double timeout_s, bool queued) {
  Reduction reduction = reduction_of(type, op, factor);
  return collective(engine, timeout_s, queued, [=](Collectives& collectives, const Wait& wait) {
    return collectives.reduce_to(root, reduction, pointer(data), count, wait);
  });
}

nb::object reduce_scatter(Engine& engine, uintptr_t out, const Spans& inputs, uint32_t type, uint32_t op,
                          double factor, double timeout_s, bool queued) {
  Reduction reduction = reduction_of(type, op, factor);
  return collective(engine, timeout_s, queued,
                    [=, inputs = bytes_of(inputs)](Collectives& collectives, const Wait& wait) {
                      return collectives.reduce_scatter(reduction, pointer(out), inputs, wait);
                    });
}

nb::object all_gather(Engine& engine, const Spans& outs, uintptr_t in, uint64_t nbytes, double timeout_s,
                      bool queued) {
  return collective(engine, timeout_s, queued,
                    [=, outs = bytes_of(outs)](Collectives& collectives, const Wait& wait) {
                      return collectives.all_gather(outs, {pointer(in), nbytes}, wait);
                    });
}

nb::object all_gather_even(Engine& engine, uintptr_t out, int ranks, uintptr_t in, uint64_t nbytes,
                           double timeout_s, bool queued) {
  return collective(engine, timeout_s, queued, [=](Collectives& collectives, const Wait& wait) {
    return collectives.all_gather(even(out, nbytes, ranks), {pointer(in), nbytes}, wait);
  });
}

nb::object gather(Engine& engine, int root, const Spans& outs, uintptr_t in, uint64_t nbytes,
                  double timeout_s, bool queued) {
  return collective(engine, timeout_s, queued,
                    [=, outs = bytes_of(outs)](Collectives& collectives, const Wait& wait) {
                      return collectives.gather(root, outs, {pointer(in), nbytes}, wait);
                    });
}

nb::object broadcast(Engine& engine, int root, uintptr_t data, uint64_t nbytes, double timeout_s,
                     bool queued) {
  return collective(engine, timeout_s, queued, [=](Collectives& collectives, const Wait& wait) {
    return collectives.broadcast(root, {pointer(data), nbytes}, wait);
  });
}

nb::object scatter(Engine& engine, int root, uintptr_t out, uint64_t nbytes, const Spans& inputs,
                   double timeout_s, bool queued) {
  return collective(engine, timeout_s, queued,
                    [=, inputs = bytes_of(inputs)](Collectives& collectives, const Wait& wait) {
                      return collectives.scatter(root, {pointer(out), nbytes}, inputs, wait);
                    });
}

nb::object all_to_all(Engine& engine, const Spans& outs, const Spans& inputs, double timeout_s, bool queued) {
  return collective(
      engine, timeout_s, queued,
      [outs = bytes_of(outs), inputs = bytes_of(inputs)](Collectives& collectives, const Wait& wait) {
        return collectives.all_to_all(outs, inputs, wait);
      });
}

nb::object barrier(Engine& engine, double timeout_s, bool queued) {
  return collective(engine, timeout_s, queued,
                    [](Collectives& collectives, const Wait& wait) { return collectives.barrier(wait); });
}

nb::object finish(Engine& engine, uint64_t ticket, double timeout_s) {
  Result result;
  {
    GilReleased released;
    result = engine.finish(ticket, wait_for(timeout_s));
  }
  return outcome(std::move(result));
}

nb::object finish_message(Engine& engine, uint64_t number, double timeout_s) {
  Result result;
  {
    GilReleased released;
    result = engine.finish_message(number, wait_for(timeout_s));
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return nb::cast(std::move(result));
}

// Changes of the members always tell who they are about.
template <typename Change>
Result changed(Engine& engine, Change&& change) {
  Result result;
  {
    GilReleased released;
    result = engine.change(change);
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return result;
}

Result found(Engine& engine, const std::vector<int>& ranks, double timeout_s) {
  return changed(engine, [&, wait = wait_for(timeout_s)](Group& group) {
    group.found(ranks, wait);
    return group.members();
  });
}

Result admit(Engine& engine, const std::vector<int>& ranks, double timeout_s) {
  return changed(engine, [&, wait = wait_for(timeout_s)](Group& group) { return group.admit(ranks, wait); });
}

Result expel(Engine& engine, const std::vector<int>& ranks, double timeout_s) {
  return changed(engine, [&, wait = wait_for(timeout_s)](Group& group) {
    group.expel(ranks, wait);
    return group.members();
  });
}

Result join(Engine& engine, double timeout_s) {
  Result result;
  {
    GilReleased released;
    result = engine.join(wait_for(timeout_s));
  }
  if (PyErr_Occurred() != nullptr) throw nb::python_error();
  return result;
}

void claim(Engine& engine) { engine.group().claim(); }

void plan_fault(Engine& engine, uint32_t point, uint64_t nth, bool kill) {
  engine.group().faults().set(static_cast<Point>(point), nth, kill ? Action::kKill : Action::kStop);
}

void bind_engine_collectives(nb::class_<Engine>& engine) {
  engine
      .def("all_reduce", &all_reduce, "data"_a, "count"_a, "type"_a, "op"_a, "factor"_a, "timeout_s"_a,
           "queued"_a)
      .def("reduce_to", &reduce_to, "root"_a, "data"_a, "count"_a, "type"_a, "op"_a, "factor"_a,
           "timeout_s"_a, "queued"_a)
      .def("reduce_scatter", &reduce_scatter, "out"_a, "inputs"_a, "type"_a, "op"_a, "factor"_a,
           "timeout_s"_a, "queued"_a)
      .def("all_gather", &all_gather, "outs"_a, "data"_a, "nbytes"_a, "timeout_s"_a, "queued"_a)
      .def("all_gather_even", &all_gather_even, "out"_a, "ranks"_a, "data"_a, "nbytes"_a, "timeout_s"_a,
           "queued"_a)
      .def("gather", &gather, "root"_a, "outs"_a, "data"_a, "nbytes"_a, "timeout_s"_a, "queued"_a)
      .def("broadcast", &broadcast, "root"_a, "data"_a, "nbytes"_a, "timeout_s"_a, "queued"_a)
      .def("scatter", &scatter, "root"_a, "out"_a, "nbytes"_a, "inputs"_a, "timeout_s"_a, "queued"_a)
      .def("all_to_all", &all_to_all, "outs"_a, "inputs"_a, "timeout_s"_a, "queued"_a)
      .def("barrier", &barrier, "timeout_s"_a, "queued"_a)
      .def("done", &Engine::done, "ticket"_a)
      .def("finish", &finish, "ticket"_a, "timeout_s"_a);
}

void bind_engine_messages(nb::class_<Engine>& engine) {
  engine
      .def(
          "send",
          [](Engine& self, int to, uintptr_t data, uint64_t nbytes, int64_t tag) {
            return self.send(to, pointer(data), nbytes, tag);
          },
          "to"_a, "data"_a, "nbytes"_a, "tag"_a)
      .def(
          "receive",
          [](Engine& self, int from, uintptr_t data, uint64_t nbytes, int64_t tag) {
            return self.receive(from, pointer(data), nbytes, tag);
          },
          "source"_a, "data"_a, "nbytes"_a, "tag"_a)
      .def("message_done", &Engine::message_done, "number"_a)
      .def("finish_message", &finish_message, "number"_a, "timeout_s"_a)
      .def("move_messages_aside", &Engine::move_messages_aside);
}

void bind_engine_members(nb::class_<Engine>& engine) {
  engine.def("claim", &claim, "Takes the place of this rank: others can be told to let it in.")
      .def(
          "claimed", [](Engine& self, const std::vector<int>& ranks) { return self.group().claimed(ranks); },
          "ranks"_a)
      .def(
          "waits", [](Engine& self, int rank) { return self.group().waits(rank); }, "rank"_a)
      .def(
          "gone", [](Engine& self, int rank) { return self.group().gone(rank); }, "rank"_a)
      .def("found", &found, "ranks"_a, "timeout_s"_a)
      .def("admit", &admit, "ranks"_a, "timeout_s"_a)
      .def("expel", &expel, "ranks"_a, "timeout_s"_a)
      .def("join", &join, "timeout_s"_a)
      .def("plan_fault", &plan_fault, "point"_a, "nth"_a, "kill"_a)
      .def("close", &Engine::close, nb::call_guard<GilReleased>())
      .def_prop_ro("members", [](Engine& self) { return self.group().copy_of_members(); })
      .def_prop_ro("joined", [](Engine& self) { return self.group().joined(); })
      .def_prop_ro("capacity", [](Engine& self) { return self.group().capacity(); })
      .def_prop_ro(
          "address", [](Engine& self) { return std::make_pair(getpid(), self.group().control_fd()); },
          "Process and descriptor by which others find the group.");
}

}  // namespace

void bind_pg(nb::module_& m) {
  nb::class_<Result>(m, "GroupResult", "How an operation of a process group ended, unless with every member.")
      .def_prop_ro("code", [](const Result& self) { return static_cast<int>(self.code); })
      .def_ro("reason", &Result::reason)
      .def_ro("contributors", &Result::contributors)
      .def_ro("source", &Result::source);
  nb::class_<Engine> engine(m, "GroupEngine", "One rank of a process group whose ranks share this host.");
  engine.def(nb::init<uint32_t, int, int, int>(), "capacity"_a, "rank"_a, "pid"_a, "fd"_a);
  bind_engine_collectives(engine);
  bind_engine_messages(engine);
  bind_engine_members(engine);
}

}  // namespace mooncake::ep::pg
