#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include "bind.hpp"
#include "channel.hpp"

namespace nb = nanobind;

namespace mooncake {

namespace {

const ChannelLimits kDefaults;

const char* kind_name(Event::Kind kind) {
  switch (kind) {
    case Event::Kind::kRequest:
      return "request";
    case Event::Kind::kNotify:
      return "notify";
    case Event::Kind::kHello:
      return "hello";
    case Event::Kind::kRefused:
      return "refused";
    default:
      return "lost";
  }
}

nb::object to_tuple(const Event& event) {
  // Whatever bytes a peer sends as a method make a string: it then has no handler, and nothing else happens.
  nb::object method = nb::steal(PyUnicode_DecodeUTF8(
      event.method.data(), static_cast<Py_ssize_t>(event.method.size()), "backslashreplace"));
  if (!method.is_valid()) throw nb::python_error();
  return nb::make_tuple(kind_name(event.kind), event.connection, event.request, method, to_bytes(event.body));
}

// Handler threads are daemons of the Python side and check nothing but the queue, so Ctrl-C need not reach
// them.
template <typename Pop>
nb::object pop_event(double timeout_s, Pop&& pop) {
  Event event;
  bool found;
  {
    GilReleased release;
    found = pop(deadline_after(timeout_s), &event);
  }
  return found ? to_tuple(event) : nb::none();
}

nb::tuple connect(Channel& channel, const std::string& host, uint16_t port, double timeout_s) {
  uint64_t connection = 0;
  std::string hello;
  Status status;
  require_origin(channel.origin());
  {
    Interruptible released;
    status = channel.connect(host, port, deadline_after(timeout_s), &connection, &hello);
    if (status.code == Code::kTimeout) status.code = Code::kUnreachable;
  }
  if (status.ok() && PyErr_Occurred() != nullptr) channel.disconnect(connection);
  throw_if_interrupted();
  check(status);
  return nb::make_tuple(connection, to_bytes(hello));
}

void notify(Channel& channel, uint64_t connection, const std::string& method, const nb::bytes& body,
            double timeout_s) {
  std::string message = to_string(body);
  Status status;
  require_origin(channel.origin());
  {
    Interruptible released;
    status = channel.notify(connection, method, message, deadline_after(timeout_s));
    if (status.code == Code::kTimeout) status.code = Code::kNoAnswer;
  }
  throw_if_interrupted();
  check(status);
}

// (failed at the other side, body)
nb::tuple call(Channel& channel, uint64_t connection, const std::string& method, const nb::bytes& body,
               double timeout_s) {
  std::string request = to_string(body), reply, remote_error;
  Status status;
  require_origin(channel.origin());
  {
    Interruptible released;
    status = channel.call(connection, method, request, deadline_after(timeout_s), &reply, &remote_error);
    if (status.code == Code::kTimeout) status.code = Code::kNoAnswer;
  }
  throw_if_interrupted();
  check(status);
  bool failed = !remote_error.empty();
  return nb::make_tuple(failed, to_bytes(failed ? remote_error : reply));
}

void serve_compiled(Channel& channel, const std::string& method, const nb::object& capsule) {
  auto* handler = static_cast<const mc_handler_v1*>(PyCapsule_GetPointer(capsule.ptr(), MC_HANDLER_CAPSULE));
  if (handler == nullptr) {
    PyErr_Clear();
    throw nb::type_error("the handler is no PyCapsule named '" MC_HANDLER_CAPSULE "'");
  }
  if (handler->abi_major != MC_HANDLER_ABI_MAJOR || handler->struct_size < sizeof(mc_handler_v1)) {
    throw nb::value_error(("the handler of '" + method + "' is of version " +
                           std::to_string(handler->abi_major) + " of the ABI, this engine knows version 1")
                              .c_str());
  }
  if (!channel.serve_compiled(method, handler)) {
    throw nb::value_error(("method '" + method + "' already has a compiled handler").c_str());
  }
}

nb::bytes hello_of(Channel& channel, uint64_t connection) {
  std::string hello;
  check(channel.hello_of(connection, &hello));
  return to_bytes(hello);
}

nb::bytes certificate_of(Channel& channel, uint64_t connection) {
  return to_bytes(channel.certificate_of(connection));
}

}  // namespace

void bind_channel(nb::module_& m) {
  nb::class_<Channel>(m, "Channel",
                      "Framed requests and notifications between engines; one thread of its own.")
      .def(
          "__init__",
          [](Channel* self, size_t queued_messages, size_t queued_bytes, size_t unsent_bytes,
             size_t max_answers, size_t ungreeted, double greeting_s, double silence_s) {
            new (self) Channel(ChannelLimits{queued_messages, queued_bytes, unsent_bytes, max_answers,
                                             ungreeted, greeting_s, silence_s});
          },
          nb::kw_only(), nb::arg("queued_messages") = kDefaults.queued_messages,
          nb::arg("queued_bytes") = kDefaults.queued_bytes, nb::arg("unsent_bytes") = kDefaults.unsent_bytes,
          nb::arg("max_answers") = kDefaults.max_answers, nb::arg("ungreeted") = kDefaults.ungreeted,
          nb::arg("greeting_s") = kDefaults.greeting_s, nb::arg("silence_s") = kDefaults.silence_s)
      .def(
          "use_tls",
          [](Channel& c, const std::string& ca, const std::string& certificate, const std::string& key,
             bool verify_host) { check(c.use_tls({ca, certificate, key}, verify_host)); },
          nb::arg("ca_file"), nb::arg("certificate_file"), nb::arg("key_file"), nb::arg("verify_host"))
      .def(
          "listen",
          [](Channel& c, const std::string& host, uint16_t port, uint16_t last_port) {
            check(c.listen(host, port, last_port));
          },
          nb::arg("host"), nb::arg("port"), nb::arg("last_port") = 0)
      .def_prop_ro("port", &Channel::port)
      .def("reserve", &Channel::reserve, nb::arg("method"))
      .def("serve_compiled", &serve_compiled, nb::arg("method"), nb::arg("capsule"), nb::keep_alive<1, 3>())
      .def(
          "start", [](Channel& c, const nb::bytes& hello) { check(c.start(to_string(hello))); },
          nb::arg("hello"))
      .def("close", &Channel::close, nb::call_guard<GilReleased>())
      .def("connect", &connect, nb::arg("host"), nb::arg("port"), nb::arg("timeout_s"),
           nb::sig("def connect(self, host: str, port: int, timeout_s: float) -> tuple[int, bytes]"))
      .def("call", &call, nb::arg("connection"), nb::arg("method"), nb::arg("body"), nb::arg("timeout_s"),
           nb::sig("def call(self, connection: int, method: str, body: bytes, timeout_s: float) -> "
                   "tuple[bool, bytes]"))
      .def("notify", &notify, nb::arg("connection"), nb::arg("method"), nb::arg("body"), nb::arg("timeout_s"))
      .def("alive", &Channel::alive, nb::arg("connection"))
      .def("disconnect", &Channel::disconnect, nb::arg("connection"))
      .def("hello_of", &hello_of, nb::arg("connection"))
      .def("certificate_of", &certificate_of, nb::arg("connection"))
      .def(
          "next_request",
          [](Channel& c, double timeout_s, uint64_t after, bool own) {
            return pop_event(timeout_s,
                             [&](uint64_t d, Event* e) { return c.next_request(d, e, after, own); });
          },
          nb::arg("timeout_s"), nb::arg("after") = 0, nb::arg("own") = false,
          nb::sig("def next_request(self, timeout_s: float, after: int = 0, own: bool = False) -> "
                  "tuple[str, int, int, str, bytes] | None"))
      .def(
          "next_event",
          [](Channel& c, double timeout_s) {
            return pop_event(timeout_s, [&](uint64_t d, Event* e) { return c.next_event(d, e); });
          },
          nb::arg("timeout_s"),
          nb::sig("def next_event(self, timeout_s: float) -> tuple[str, int, int, str, bytes] | None"))
      .def(
          "reply",
          [](Channel& c, uint64_t connection, uint64_t request, bool failed, const nb::bytes& body) {
            check(c.reply(connection, request, failed, to_string(body)));
          },
          nb::arg("connection"), nb::arg("request"), nb::arg("failed"), nb::arg("body"));
}

}  // namespace mooncake
